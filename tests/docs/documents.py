"""The executable parts of a document, and the rules for its blocks.

- A `python` block whose first line is `# name.py` is a file, and so is a `bash` block whose first line after `#!` is
  `# name`: the document's commands find these files in their working directory.
- The first other `python` block of a document is its start: the program of every section begins with it.
- The other `python` blocks of a `##` section form one program, in their order. All ranks run it: two, or the number in
  the comment `<!-- ranks: N -->` below the section's heading. `<!-- debug mode -->` there: with `MPICOMM_DEBUG=1`.
- A `text` block directly after `python` blocks is the output of all ranks together, with the lines in any order.
- `<!-- raises -->` before a `python` block: it raises on every rank, and the next `text` block contains the message.
- The commands of a `console` block run in one working directory, in their order, and their output must match the output
  shown. `<!-- fails -->` before it: the command fails, and its output contains every line shown.
  `<!-- elsewhere -->`: the commands need a cluster, and tests do not run them.

In the output shown, `...` matches any text.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from tests.launching import ROOT

DOCS = ROOT / "docs"
TUTORIAL = tuple(
    DOCS / f"{name}.md" for name in ("first-job", "messages-and-collectives", "training", "cluster", "when-it-fails")
)
LIMITATIONS = DOCS / "limitations.md"
REFERENCE = DOCS / "reference.md"
LAUNCHING = DOCS / "launching.md"
DOCUMENTS = (*TUTORIAL, DOCS / "coming-from.md", DOCS / "trainer.md", DOCS / "callbacks.md", LIMITATIONS)

RANKS = 2  # the default for a section without the comment
_FENCE = re.compile(r"^```(\w*)$")
_COMMENT = re.compile(r"^<!-- (.*) -->$")
_DEBUG_MODE = "debug mode"
_RANKS = re.compile(r"^ranks: (\d+)$")
MARKS = ("raises", "fails", "elsewhere")


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced code block."""

    language: str
    lines: tuple[str, ...]
    first_line: int
    """The line number of its first line in the document, from 1."""

    mark: str = ""
    """The comment before it."""

    @property
    def text(self) -> str:
        """The content, with line ends."""
        return "".join(f"{line}\n" for line in self.lines)

    @property
    def file_name(self) -> str | None:
        """The name of the file that the block contains; None if it is not a file."""
        lines = [line for line in self.lines if not line.startswith("#!")]
        found = re.fullmatch(r"# ([\w-]+\.\w+)", lines[0]) if lines else None
        return found[1] if found and self.language in ("python", "bash") else None


@dataclasses.dataclass(frozen=True)
class Step:
    """A part of a section's program, and its shown output."""

    code: Block
    shown: tuple[str, ...] = ()

    @property
    def raises(self) -> bool:
        return self.code.mark == "raises"


@dataclasses.dataclass(frozen=True)
class Command:
    """A command and its shown output."""

    line: str
    shown: tuple[str, ...]
    mark: str


@dataclasses.dataclass
class Section:
    """The content below one heading of the second level."""

    title: str
    ranks: int = RANKS
    in_debug_mode: bool = False
    blocks: list[Block] = dataclasses.field(default_factory=list)

    def consoles(self) -> list[list[Command]]:
        """Return the commands of each `console` block."""
        return [_commands(block) for block in self.blocks if block.language == "console"]

    def snippets(self) -> list[Step]:
        """Return the parts of the program, each with the text that follows it."""
        steps: list[Step] = []
        for block in self.blocks:
            if block.language == "python" and block.file_name is None:
                steps.append(Step(block))
            elif block.language == "text":
                assert steps, f"line {block.first_line}: output without a program"
                steps[-1] = Step(steps[-1].code, block.lines)
        return steps


@dataclasses.dataclass
class Document:
    """A document, split into sections."""

    path: Path
    sections: list[Section]

    @property
    def start(self) -> Step:
        """The first step of every section."""
        return next(step for section in self.sections for step in section.snippets())

    def files(self) -> dict[str, str]:
        """Return the content of the document's files, by name."""
        named = {block.file_name: block.text for section in self.sections for block in section.blocks}
        return {name: text for name, text in named.items() if name is not None}

    def consoles(self) -> list[list[Command]]:
        """Return the commands of each `console` block."""
        return [console for section in self.sections for console in section.consoles()]

    def commands(self) -> list[Command]:
        """Return all commands, in order."""
        return [command for console in self.consoles() for command in console]

    def with_snippets(self, ranks: int, *, in_debug_mode: bool) -> list[Section]:
        """Return the sections whose programs run on `ranks` ranks, with or without debug mode."""
        way = ranks, in_debug_mode
        return [each for each in self.sections if (each.ranks, each.in_debug_mode) == way and self.program(each)]

    def program(self, section: Section) -> list[Step]:
        """Return a section's own steps, without the document's start."""
        return [step for step in section.snippets() if step != self.start]


def read(path: Path) -> Document:
    sections = [Section("")]
    language, first_line, mark, lines = None, 0, "", []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        here = f"{path.name}, line {number}"
        if language is not None:
            if line == "```":
                sections[-1].blocks.append(Block(language, tuple(lines), first_line, mark))
                language, mark = None, ""
            else:
                lines.append(line)
        elif fence := _FENCE.match(line):
            language, first_line, lines = fence[1], number + 1, []
            assert mark in ("", *MARKS), f"{here}: unknown comment `{mark}`"
        else:
            assert mark not in MARKS, f"{here}: `{mark}` must be directly before a block"
            comment = _COMMENT.match(line)
            mark = comment[1] if comment else ""
            if line.startswith("## "):
                sections.append(Section(line[3:]))
            elif mark == _DEBUG_MODE:
                sections[-1].in_debug_mode = True
            elif ranks := _RANKS.match(mark):
                sections[-1].ranks = int(ranks[1])
    assert language is None, f"{path.name}: the block at line {first_line} is not closed"
    return Document(path, sections)


def is_like(shown: str, real: str) -> bool:
    """Return whether a line equals the shown line, in which `...` matches any text."""
    return re.fullmatch(".*".join(map(re.escape, shown.split("..."))), real) is not None


def _commands(block: Block) -> list[Command]:
    found: list[Command] = []
    for line in block.lines:
        if line.startswith("$ "):
            found.append(Command(line[2:], (), block.mark))
        else:
            found[-1] = dataclasses.replace(found[-1], shown=(*found[-1].shown, line))
    return found


def with_table(document: str, module: str, table: str) -> str:
    """Return a document with the table that `python -m tests.docs.MODULE --write` generates, between its markers."""
    begin = f"<!-- generated by python -m tests.docs.{module} --write -->"
    end = "<!-- end of the generated table -->"
    pattern = f"{re.escape(begin)}\n.*{re.escape(end)}\n"
    assert len(re.findall(pattern, document, re.DOTALL)) == 1
    return re.sub(pattern, lambda _: f"{begin}\n\n{table}\n{end}\n", document, flags=re.DOTALL)
