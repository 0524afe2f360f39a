"""The published drafts as whole descriptions, and any other draft by its config.json: for what needs no weights.

Sizes are in ``draft/config.py``. The tapped layers are those of the cards (DSpark notes, section 2); Inferact's for K3.1 Pro states
none, so the other K3.1 draft's stand in: they decide where a step is tapped, not what it costs.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from kimi_jax.draft.config import PUBLISHED, DraftError
from kimi_jax.draft.config_read import DraftSpec, read_spec
from kimi_jax.draft.rope import RopeConfig, YarnConfig

MASK_ID = 163837
"""The noise token of lightseekorg's draft; the others are taken to use it too."""

_PRO = (7, 23, 67, 83, 91)

PUBLISHED_SPECS: Mapping[str, DraftSpec] = MappingProxyType(
    {
        name: DraftSpec(PUBLISHED[name], taps, "attn_res", rope, MASK_ID)
        for name, taps, rope in (
            ("k3-mla", (7, 31, 47, 63, 87), RopeConfig(50_000.0)),
            ("k3.1-gqa", _PRO, RopeConfig(50_000.0, YarnConfig(16.0, 65_536))),
            ("k3.1-mla", _PRO, RopeConfig(50_000.0, YarnConfig(32.0, 32_768))),
        )
    }
)
"""Name -> the draft. What no card says (the stream of the K3.1 drafts, their bases of rotation) costs the same either way."""


def named_draft(draft: str | Path) -> DraftSpec:
    """A published draft by its name here, or the one that a config.json or a draft folder describes.

    Raises:
      DraftError: there is none of that name; or the file cannot be read or run, with every reason.
    """
    if str(draft) in PUBLISHED_SPECS:
        return PUBLISHED_SPECS[str(draft)]
    path = Path(draft)
    path = path / "config.json" if path.is_dir() else path
    if path.is_file():
        values = _values(path)
        return read_spec(values, str(path), None if "aux_hidden_stream" in values else "attn_res")
    known = f"known: {', '.join(PUBLISHED_SPECS)}; or a draft's folder, or its config.json"
    raise DraftError(f'No draft is called "{draft}"', [known])


def _values(file: Path) -> Mapping[str, object]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DraftError(f"No draft can be read from {file}", [str(error)]) from None
    if not isinstance(values, Mapping):
        raise DraftError(f"No draft can be read from {file}", ["it holds no object"])
    return values
