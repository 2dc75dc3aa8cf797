"""Names without ``module.`` in torch.distributed.checkpoint's state dicts, as for torch's own wrapper."""

from __future__ import annotations

import sys
from typing import Any


def treat_as_torchs(wrapper: type) -> None:
    """Where its state_dict module is loaded (two seconds, so never from here), it takes ``wrapper`` for its DDP too.

    It looks for the prefix by ``isinstance(..., DDP)``, a name of its own that it uses nowhere else, and asks for a
    module's children before it names what is in them.
    """
    loaded: Any = sys.modules.get("torch.distributed.checkpoint.state_dict")
    known = getattr(loaded, "DDP", ())
    known = known if isinstance(known, tuple) else (known,)
    if known and wrapper not in known:
        loaded.DDP = (*known, wrapper)
