"""`moet verify`: is every byte of a pack what was packed?"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from moet.checkpoints import Checkpoint
from moet.checkpoints.local import local_checkpoint
from moet.cli.progress import Bar
from moet.cli.ui import emit_json, err, out
from moet.pack import verify_pack


def verify(
    pack: Annotated[Path, typer.Argument(help="A pack (a directory).")],
    model: Annotated[
        str | None,
        typer.Option(
            help="Also check that the pack is of this checkpoint, and its FP4 rows there."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the problems as JSON.")] = False,
) -> None:
    """Check PACK to the last byte; every problem is named with its file and row.

    Ends with status 0 when nothing is wrong, else with 1. A server checks rows as it reads them, so
    a damaged pack is never served; this tells beforehand, and all at once.

        moet verify /nvme/r1.moet --model ./DeepSeek-R1-NVFP4
    """
    with ExitStack() as stack:
        checkpoint = (
            stack.enter_context(Checkpoint.open(local_checkpoint(model))) if model else None
        )
        bar = stack.enter_context(Bar("verifying"))
        problems = verify_pack(pack, bar, checkpoint=checkpoint)
    if as_json:
        emit_json({"pack": str(pack), "problems": [asdict(problem) for problem in problems]})
    elif not problems:
        out.print(f"[bold]{escape(str(pack))}[/]: every byte is what was packed", soft_wrap=True)
    for problem in problems if not as_json else ():
        err.print(f"[bold red]damaged:[/] {escape(str(problem))}", soft_wrap=True)
    raise typer.Exit(1 if problems else 0)
