"""What a compiled step may cost: declared in sharding/budgets/, and a difference that names the part and the operation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from kimi_jax.placement import toml_file
from kimi_jax.placement.audit import COLLECTIVES, Audit
from kimi_jax.placement.codeobjects import Kernel
from kimi_jax.problems import ProblemsError

MOST = ("temp_bytes", "launches", "inner_launches", "large_copies", "weight_readers", "spilling_kernels")
RATIOS = ("moved_ratio",)
KEYS = ("description", *MOST, *RATIOS, "collectives")
SHOWN = 3
"""Instructions that one line of a difference names."""


class BudgetError(ProblemsError):
    """A budget file that cannot be read."""


@dataclass(frozen=True)
class Budget:
    """The most that one compiled step may cost.

    Attributes:
      name: of the file.
      description: one line.
      most: number -> its limit; a number that is absent is not limited. ``temp_bytes`` on one device; ``launches`` of a
        step, ``inner_launches`` of the loops inside it; ``large_copies`` above 1 MiB; ``weight_readers`` that are no
        product, kernel or slice; ``spilling_kernels``; ``moved_ratio``, bytes that a decode step reads and writes over those
        that it must.
      collectives: (part of the step, kind) -> how many; what is not named here is not allowed.
    """

    name: str
    description: str
    most: Mapping[str, float]
    collectives: Mapping[tuple[str, str], int]


def load_budget(name: str | Path) -> Budget:
    """A shipped budget by name, or a budget file by path (*.toml).

    Raises:
      BudgetError: no such file, or all that is wrong in it.
    """
    path = toml_file.find("budgets", name, BudgetError)
    table = toml_file.parse(path, BudgetError)
    problems = toml_file.unknown_keys(table, KEYS, "the file")
    problems += toml_file.wrong_type(table, "description", str, "")
    for key in MOST:
        problems += toml_file.wrong_type(table, key, int, "")
    for key in RATIOS:
        problems += toml_file.wrong_type(table, key, float, "")
    stated = table.get("collectives", {})
    if not isinstance(stated, dict):
        problems.append(f"collectives must be a table, got {stated!r}")
        stated = {}
    allowed: dict[tuple[str, str], int] = {}
    for part, kinds in stated.items():
        if not isinstance(kinds, dict):
            problems.append(f"[collectives] {part} must be a table of kinds, got {kinds!r}")
            continue
        where = f"[collectives.{part}]"
        problems += toml_file.unknown_keys(kinds, COLLECTIVES, where)
        for kind, count in kinds.items():
            problems += toml_file.wrong_type(kinds, kind, int, f"{where} ")
            allowed[part, kind] = count
    if problems:
        raise BudgetError(f"Budget file {path}", problems)
    most = {key: table[key] for key in (*MOST, *RATIOS) if key in table}
    return Budget(path.stem, table.get("description", ""), MappingProxyType(most), MappingProxyType(allowed))


def over_budget(found: Audit, kernels: Sequence[Kernel], budget: Budget) -> list[str]:
    """One line per limit that a step breaks, naming the part of the step and the operation; empty when it keeps all."""
    spilling = [kernel for kernel in kernels if kernel.spills]
    costs: dict[str, float] = {
        "temp_bytes": found.memory.temp,
        "large_copies": len(found.copies),
        "weight_readers": len(found.readers),
        "spilling_kernels": len(spilling),
    }
    if found.launches is not None:
        costs |= {"launches": found.launches.step, "inner_launches": found.launches.inner}
    again = found.moved.again if found.moved else ()
    if found.moved is not None:
        costs["moved_ratio"] = found.moved.ratio
    culprits = {
        "large_copies": [
            f"{copy.part}: {copy.op_name or copy.instruction}, {copy.bytes:,} bytes" for copy in found.copies
        ],
        "weight_readers": [f"{r.part}: {r.op_name or r.instruction} reads {r.argument}" for r in found.readers],
        "spilling_kernels": [f"{kernel.name}: {kernel.spills} registers" for kernel in spilling],
        "moved_ratio": [f"{a.argument} read by {', '.join(a.instructions)}: {a.bytes:,.0f} bytes more" for a in again],
    }
    lines = []
    for key, cost in costs.items():
        limit = budget.most.get(key)
        if limit is not None and cost > limit:
            named = list(dict.fromkeys(culprits.get(key, [])))
            more = f" and {len(named) - SHOWN} more" if len(named) > SHOWN else ""
            said = f" ({'; '.join(named[:SHOWN])}{more})" if named else ""
            counted = f"{cost:.4f}, budget {limit}" if key in RATIOS else f"{cost:,}, budget {limit:,}"
            lines.append(f"{key}: {counted}{said}")
    counted = found.counted()
    for part, kind in sorted({*counted, *budget.collectives}):
        count, limit = counted.get((part, kind), 0), budget.collectives.get((part, kind), 0)
        if count > limit:
            sizes = sorted({c.bytes for c in found.collectives if (c.part, c.kind) == (part, kind)})
            lines.append(
                f"{part}: {kind} {count}, budget {limit} (of {', '.join(f'{size:,}' for size in sizes)} bytes)"
            )
    return lines
