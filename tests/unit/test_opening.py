import pytest

from hydssp.errors import UserError
from hydssp.transport.opening import open_server, open_worker


@pytest.mark.parametrize("open_end", [open_server, open_worker])
def test_an_unknown_transport_is_refused_with_those_that_there_are(open_end):
    with pytest.raises(UserError, match=r"transport\.name=pigeon: allowed are rma, two_sided"):
        open_end("pigeon", None, 1, "float32")
