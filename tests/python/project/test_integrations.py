"""brimful.integrations without the packages that it is for."""

import sys
import tomllib
from pathlib import Path

import pytest
from test_package import run_python

ROOT = Path(__file__).resolve().parents[3]
ADAPTERS = {
    "accelerate": "accelerate",
    "fabric": "lightning",
    "lightning": "lightning",
    "lm_eval": "lm_eval",
    "transformers": "transformers",
}


@pytest.mark.parametrize(("adapter", "extra"), ADAPTERS.items())
def test_a_missing_package_is_one_line_that_names_the_command(monkeypatch, adapter, extra):
    monkeypatch.setitem(sys.modules, extra, None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, f"brimful.integrations.{adapter}", raising=False)
    with pytest.raises(ModuleNotFoundError) as caught:
        __import__(f"brimful.integrations.{adapter}")
    assert str(caught.value) == (
        f"this adapter needs a package that is not installed (name: {extra}); "
        f"run: pip install 'brimful[{extra}]'"
    )


def test_the_metadata_has_the_extras():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {*ADAPTERS.values(), "ray"} <= set(project["optional-dependencies"])


def test_every_package_is_shipped():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = (ROOT / "python").glob("brimful/**/__init__.py")
    assert sorted(listed) == sorted(
        ".".join(init.parent.relative_to(ROOT / "python").parts) for init in found
    )


def test_a_package_that_lacks_one_of_its_own_says_so_itself(monkeypatch, tmp_path):
    (tmp_path / "broken_trainer.py").write_text("import a_module_of_its_own\n")
    monkeypatch.syspath_prepend(tmp_path)
    from brimful.integrations._extra import require

    with pytest.raises(ModuleNotFoundError, match="No module named 'a_module_of_its_own'"):
        require("broken_trainer")


def test_importing_brimful_imports_no_adapter():
    loaded = run_python("-c", "import sys, brimful; print(*sys.modules)").stdout.split()
    assert "brimful" in loaded
    assert not {"brimful.integrations", *ADAPTERS.values(), "ray"}.intersection(loaded)
