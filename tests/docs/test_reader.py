"""The reader of documents and the program of their snippets: mistakes in a document are reported with their line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs import documents, program
from tests.docs.documents import Document

TEXT = """\
# A document

```python
import math
```

## One

<!-- ranks: 4 -->

Some words.

```python
number = math.floor(2.5)
```

```python
print(number)
```

```text
2
```

<!-- raises -->
```python
math.sqrt(-number)
```

```text
ValueError: ...
```

## Two

```python
# name.py
import sys
```

```bash
#!/bin/bash
# job.sh
true
```

<!-- a comment -->

<!-- fails -->
```console
$ python name.py
one
two
$ python name.py --again
```
"""


def document(folder: Path, text: str) -> Document:
    path = folder / "text.md"
    path.write_text(text)
    return documents.read(path)


def run(folder: Path, text: str) -> None:
    read = document(folder, text)
    for section in read.sections:
        program.run(read, section)


def test_the_blocks_that_are_read(tmp_path: Path) -> None:
    read = document(tmp_path, TEXT)
    assert [(section.title, section.ranks) for section in read.sections] == [("", 2), ("One", 4), ("Two", 2)]
    assert read.start.code.lines == ("import math",)
    steps = read.program(read.sections[1])
    assert [(step.code.first_line, step.code.mark, step.shown) for step in steps] == [
        (14, "", ()),
        (18, "", ("2",)),
        (27, "raises", ("ValueError: ...",)),
    ]
    assert [section.title for section in read.with_snippets(4, in_debug_mode=False)] == ["One"]
    assert read.with_snippets(2, in_debug_mode=False) == []
    assert read.files() == {"name.py": "# name.py\nimport sys\n", "job.sh": "#!/bin/bash\n# job.sh\ntrue\n"}
    assert [(command.line, command.shown, command.mark) for command in read.commands()] == [
        ("python name.py", ("one", "two"), "fails"),
        ("python name.py --again", (), "fails"),
    ]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("-number", "number", "text.md:27: does not raise"),
        ("ValueError: ...", "TypeError: ...", "text.md:27: 'TypeError: ...' is not in"),
        ("\n```text\nValueError: ...\n```\n", "", "text.md:27: no message is shown"),
    ],
)
def test_a_missing_failure_is_detected(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        run(tmp_path, TEXT.replace(old, new))
