# SPDX-License-Identifier: MIT
"""The Python package as a thing to install: nothing is forgotten, nothing is installed twice, and
what it offers has doc strings and type hints.

The wheel is built without network, where meson-python is there (tests/requirements.txt has it).
"""
import email
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent.parent
BUILD = ROOT / "build"
PACKAGE = ROOT / "python/penstock"
FOLDERS = [PACKAGE] + sorted(path for path in PACKAGE.iterdir()
                             if path.is_dir() and path.name != "__pycache__")
BUILT = bool(list((BUILD / "python/penstock").glob("_penstock*.so")))

needs_build = pytest.mark.skipif(not BUILT, reason="the Python package is not built")


def sources() -> set[str]:
    """What belongs into the package, relative to it."""
    return {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*")
            if path.suffix in (".py", ".pyi") or path.name == "py.typed"}


def run(*command, **more) -> str:
    done = subprocess.run([str(word) for word in command], text=True, capture_output=True, **more)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def environment() -> dict:
    env = dict(os.environ, PYTHONPATH=str(BUILD / "python"))
    # The interpreter's own tools first: meson of the right age comes with meson-python.
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]])
    return env


# ------------------------------------------------------------------------------- nothing forgotten

@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_every_file_is_listed_for_the_build(folder):
    text = (folder / "meson.build").read_text()
    listed = re.findall(r"'([\w.]+\.pyi?|py\.typed)'", text)
    there = [path.name for path in folder.iterdir()
             if path.suffix in (".py", ".pyi") or path.name == "py.typed"]
    assert sorted(listed) == sorted(there)
    assert "install_sources(" in text and "fs.copyfile(" in text


def test_every_folder_is_a_part_of_the_build():
    above = (PACKAGE / "meson.build").read_text()
    assert "subdir('penstock')" in (ROOT / "python/meson.build").read_text()
    for folder in FOLDERS[1:]:
        assert f"subdir('{folder.name}')" in above


@needs_build
def test_the_build_folder_holds_the_whole_package():
    missing = [name for name in sources() if not (BUILD / "python/penstock" / name).exists()]
    assert not missing


@needs_build
def test_the_versions_agree():
    version = re.search(r"version: '([^']+)'", (ROOT / "meson.build").read_text()).group(1)
    assert f'PEN_VERSION "{version}"' in (ROOT / "include/penstock.h").read_text()
    found = run(sys.executable, "-c", "import penstock; print(penstock.__version__)",
                env=environment()).strip()
    assert found == version
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["dynamic"] == ["version"] and "version" not in project


def test_the_oldest_python_is_the_same_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest = re.fullmatch(r">=3\.(\d+)", project["requires-python"]).group(1)
    limited = re.search(r"Py_LIMITED_API=0x03(..)0000",
                        (PACKAGE / "meson.build").read_text()).group(1)
    assert int(oldest) == int(limited, 16)


def test_the_scripts_lead_somewhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for place in project["scripts"].values():
        module, function = place.split(":")
        path = ROOT / "python" / (module.replace(".", "/") + ".py")
        assert re.search(rf"^def {function}\(", path.read_text(), re.MULTILINE), place


# -------------------------------------------------------------------------------- words and hints

# Run in a process of its own: the interpreter of the tests may hold another build of the package.
LOOK = """
import inspect, json, sys
import penstock

found = []

def look(name, thing):
    if not (getattr(thing, "__doc__", None) or "").strip():
        found.append(f"{name} has no doc string")
    if not inspect.isfunction(thing):
        return
    signature = inspect.signature(thing)
    for parameter in signature.parameters.values():
        if parameter.annotation is parameter.empty and parameter.name not in ("self", "cls"):
            found.append(f"{name}: {parameter.name} has no type")
    if signature.return_annotation is signature.empty and not name.endswith(".__init__"):
        found.append(f"{name} does not say what it returns")

for name in penstock.__all__:
    thing = getattr(penstock, name)
    look(name, thing)
    if inspect.isclass(thing) and thing.__module__.startswith("penstock._"):
        for part, value in vars(thing).items():
            value = value.fget if isinstance(value, property) else value
            if inspect.isfunction(value) and (not part.startswith("_") or part == "__init__"):
                look(f"{name}.{part}", value)
print(json.dumps({"found": found, "all": penstock.__all__, "dir": dir(penstock)}))
"""


@needs_build
def test_what_is_offered_is_there_with_doc_strings_and_type_hints():
    answer = json.loads(run(sys.executable, "-c", LOOK, env=environment()))
    assert not answer["found"], "\n" + "\n".join(answer["found"])
    assert set(answer["all"]) <= set(answer["dir"])
    assert answer["all"] == sorted(answer["all"], key=lambda name: (name.islower(), name))


def test_every_module_says_its_idea():
    for name in sources():
        if name.endswith((".py", ".pyi")):
            lines = (PACKAGE / name).read_text().split("\n")
            assert lines[0] == "# SPDX-License-Identifier: MIT", name
            assert lines[1].startswith('"""'), name


# ----------------------------------------------------------------------------------- installation

def installed(folder: Path, tags: str) -> set[str]:
    """What `meson install` with these tags puts into a folder of ours, by name."""
    if not shutil.which("meson"):
        pytest.skip("there is no meson")
    run("meson", "install", "-C", BUILD, "--no-rebuild", "--quiet", "--tags", tags, "--destdir",
        folder)
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


@needs_build
def test_make_install_leaves_python_alone(tmp_path):
    plan = run("make", "-n", "install", cwd=ROOT)
    tags = re.search(r"meson install .*--tags (\S+)", plan).group(1)
    names = installed(tmp_path, tags)
    assert any(name.endswith("/penstock.h") for name in names)
    assert any(name.endswith("/bin/penstock") for name in names)
    assert not [name for name in names if "python" in name or name.endswith((".py", "abi3.so"))]


@needs_build
def test_the_rest_is_the_package_and_nothing_else(tmp_path):
    names = {name.partition("-packages/penstock/")[2] for name in installed(tmp_path,
                                                                          "python-runtime")}
    assert names == sources() | {"_penstock.abi3.so"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel, built as pip does it, by what is installed beside this interpreter."""
    try:
        import mesonpy  # noqa: F401
    except ImportError:
        pytest.skip("meson-python is not installed: no mesonpy")
    if not shutil.which("ninja"):
        pytest.skip("there is no ninja")
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", ROOT, "--no-build-isolation", "--no-deps",
        "--no-index", "--disable-pip-version-check", "-w", folder, env=environment())
    [path] = folder.glob("*.whl")
    return path


def test_the_wheel_is_for_every_python(wheel):
    version = re.search(r"version: '([^']+)'", (ROOT / "meson.build").read_text()).group(1)
    name, number, _, abi, _ = wheel.stem.split("-")
    assert (name, number, abi) == ("penstock", version, "abi3")


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    parts = {name.removeprefix("penstock/") for name in names if ".dist-info/" not in name}
    [command] = [name for name in parts if ".data/" in name]
    assert command.endswith(".data/scripts/penstock")
    assert parts - {command} == sources() | {"_penstock.abi3.so"}


def test_the_wheel_has_the_licence_and_says_what_it_is(wheel):
    with zipfile.ZipFile(wheel) as archive:
        [metadata] = [name for name in archive.namelist() if name.endswith("/METADATA")]
        fields = email.message_from_bytes(archive.read(metadata))
        licence = archive.read(metadata.replace("METADATA", "licenses/LICENSE")).decode()
    assert licence == (ROOT / "LICENSE").read_text()
    assert fields["License-Expression"] == "MIT" and fields["License-File"] == "LICENSE"
    assert fields["Author"] and fields["Summary"] and fields["Keywords"]
    assert fields["Requires-Python"] == ">=3.11"
    assert fields["Description-Content-Type"] == "text/markdown"
    assert fields.get_payload().lstrip().startswith("# Penstock")
    classifiers = fields.get_all("Classifier")
    assert "Typing :: Typed" in classifiers and "Operating System :: POSIX :: Linux" in classifiers
    # What is needed to load a file is Python alone.
    assert not [name for name in fields.get_all("Requires-Dist") or () if "extra ==" not in name]


def test_pip_installs_the_command_itself(wheel, tmp_path):
    """The program in C, which needs no other file of ours, and no Python to start it."""
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv")
    run(sys.executable, "-m", "pip", "--python", tmp_path / "venv/bin/python", "install",
        "--no-index", "--no-deps", "--disable-pip-version-check", wheel)
    command = tmp_path / "venv/bin/penstock"
    assert command.read_bytes()[:4] == b"\x7fELF"
    assert "libpenstock" not in run("readelf", "-d", command)
    env = {name: value for name, value in os.environ.items()
           if name not in ("LD_LIBRARY_PATH", "PYTHONPATH")}
    version = re.search(r"version: '([^']+)'", (ROOT / "meson.build").read_text()).group(1)
    assert run(command, "--version", env=env) == f"penstock {version}\n"
    report = json.loads(run(command, "copy", "pattern:1M", "null:", "--json", "-q", env=env))
    assert report["bytes"] == 1 << 20


def test_the_wheel_works_where_it_is_unpacked(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = """
import penstock, sys
penstock.tofile(b"through the wheel", "x")
buffer = bytearray(17)
with penstock.File("x") as file:
    file.read(buffer)
print(penstock.__file__, bytes(buffer))
"""
    env = dict(os.environ, PYTHONPATH=str(tmp_path))
    out = run(sys.executable, "-c", code, cwd=tmp_path, env=env)
    assert out.startswith(str(tmp_path)) and "through the wheel" in out
    help_text = run(sys.executable, "-m", "penstock.compare", "--help", cwd=tmp_path, env=env)
    assert "usage" in help_text
