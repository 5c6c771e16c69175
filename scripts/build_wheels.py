"""Builds a wheel for every supported CPython found here, and tries each in a fresh environment.

The wheels are built from the source distribution, in a temporary folder: that shows that it is
complete, and leaves the build folder of the editable install alone.
"""

import argparse
import glob
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = ("3.10", "3.11", "3.12", "3.13")


def run(*command: str | Path, **environment: str) -> None:
    print("+", *command, flush=True)
    subprocess.run(command, check=True, env=os.environ | environment)


def find_python(version: str) -> str | None:
    """Return a CPython of this version: from PATH, else from pyenv's folder."""
    name = f"python{version}"
    folders = os.environ["PATH"].split(os.pathsep)
    pyenv = os.environ.get("PYENV_ROOT", os.path.expanduser("~/.pyenv"))
    installed = sorted(glob.glob(f"{pyenv}/versions/{version}.*/bin/{name}"))
    major, minor = version.split(".")
    check = f"import sys; assert sys.version_info[:2] == ({major}, {minor})"
    for candidate in [*(os.path.join(folder, name) for folder in folders), *installed]:
        # A shim can be there although its version is switched off, hence the run.
        if os.access(candidate, os.X_OK):
            tried = subprocess.run([candidate, "-c", check], capture_output=True)
            if tried.returncode == 0:
                return candidate
    return None


def build(uv: Path, python: str, sdist: Path, out: Path, cuda: str) -> Path:
    before = set(out.glob("*.whl"))
    run(
        *(uv, "build", "--wheel", "--python", python, "--out-dir", out, sdist),
        AGL_CUDA=cuda,
        AGL_WERROR=os.environ.get("AGL_WERROR", "OFF"),
    )
    (wheel,) = set(out.glob("*.whl")) - before
    return wheel


def smoke(uv: Path, python: str, wheel: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run(uv, "venv", "--quiet", "--python", python, f"{folder}/venv")
        interpreter = f"{folder}/venv/bin/python"
        install = (uv, "pip", "install", "--quiet", "--python", interpreter)
        run(*install, "--no-deps", wheel)
        run(*install, "numpy")
        # Outside the source tree, so that nothing is imported from there.
        subprocess.run([interpreter, ROOT / "scripts/smoke_wheel.py"], check=True, cwd=folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--uv", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cuda", choices=("ON", "OFF"), default="OFF")
    options = parser.parse_args()
    uv, out = options.uv.absolute(), options.out.absolute()

    for stale in out.glob("agl_fast-*"):
        stale.unlink()
    run(uv, "build", "--sdist", "--python", sys.executable, "--out-dir", out, ROOT)
    (sdist,) = out.glob("agl_fast-*.tar.gz")

    pythons = {version: find_python(version) for version in VERSIONS}
    for version, python in pythons.items():
        if python is None:
            print(f"CPython {version} is not here: no wheel for it")
        else:
            smoke(uv, python, build(uv, python, sdist, out, options.cuda))
    for wheel in sorted(out.glob("agl_fast-*.whl")):
        print(f"{wheel.stat().st_size / 1024:8.0f} KiB  {wheel.name}")


if __name__ == "__main__":
    main()
