"""What an integration says whose library is not installed, however it is imported."""

import subprocess
import sys

import pytest

ABSENT = "import sys\nsys.modules[{name!r}] = None  # as if it were not installed\nimport dualkv\n"


@pytest.mark.parametrize("name", ["transformers", "trl", "verl"])
@pytest.mark.parametrize("line", ["dualkv.integrations.{name}", "from dualkv.integrations.{name} import x"])
def test_the_sentence_names_the_extra(name: str, line: str) -> None:
    program = (ABSENT + line).format(name=name)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    says = f"ModuleNotFoundError: dualkv.integrations.{name} needs {name}: pip install 'dualkv[{name}]'"
    assert done.stderr.splitlines()[-1] == says
