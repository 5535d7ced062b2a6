"""Build the wheels of Linux on x86-64 Linux, without a container: ``make wheels``, docs/wheels.md.

The compiler is that of the package ``ziglang``. A Python that has the stable ABI of 3.12, and its headers, are unpacked
from Debian 13's packages: it runs here with the C library of Debian 13.
"""

import argparse
import os
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

SITE = Path(sysconfig.get_path("purelib"))  # of the environment with what requirements.txt names
BUILD = Path("build/wheels").resolve()
PYTHON = "python3.13"
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
PACKAGES = [
    f"lib{PYTHON}-dev", f"lib{PYTHON}-minimal", f"lib{PYTHON}-stdlib", f"{PYTHON}-minimal",
    "libc6", "libexpat1", "libbz2-1.0", "libffi8", "libgcc-s1", "liblzma5", "libsqlite3-0", "libssl3t64", "libstdc++6",
    "libuuid1", "libzstd1", "zlib1g",
]  # fmt: skip
APT = """
Dir::Etc::sourcelist "{0}/sources.list"; Dir::Etc::sourceparts "-"; Dir::State::lists "{0}/lists";
Dir::State::status "/dev/null"; Dir::Cache "{0}/cache"; APT::Architectures {{ "amd64"; "arm64"; }};
APT::Sandbox::User "root";
"""
SOURCE = "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] {0} trixie main\n"


def script(path: Path, command: str) -> None:
    """Write an executable shell script that ends in ``command``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.write_text(f"#!/bin/sh\n{command}\n")
    path.chmod(0o755)


def unpack_pythons() -> None:
    """Unpack Debian 13's Python for both architectures; ``usr/bin/python`` runs it, emulated where it is for Arm."""
    if (BUILD / "unpacked").exists():
        return
    apt = BUILD / "apt"
    for folder in ("lists/partial", "cache/archives/partial", "debs"):
        (apt / folder).mkdir(parents=True, exist_ok=True)
    targets = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages", "Component: main"]
    mirror = subprocess.run(targets, capture_output=True, text=True, check=True).stdout.split()
    (apt / "sources.list").write_text(SOURCE.format(next(uri for uri in mirror if uri.endswith("/debian/"))))
    (apt / "apt.conf").write_text(APT.format(apt))
    env = {**os.environ, "APT_CONFIG": str(apt / "apt.conf")}
    names = [f"{package}:{debian}" for package in PACKAGES for debian in ARCHITECTURES.values()]
    subprocess.run(["apt-get", "-q", "update"], env=env, check=True)
    subprocess.run(["apt-get", "-q", "download", *names], env=env, cwd=apt / "debs", check=True)
    for machine, debian in ARCHITECTURES.items():
        root = BUILD / machine
        for package in (apt / "debs").glob(f"*_{debian}.deb"):
            subprocess.run(["dpkg", "-x", package, root], check=True)
        (loader,) = (root / f"usr/lib/{machine}-linux-gnu").glob("ld-linux-*.so.*")
        emulator = "qemu-aarch64-static -cpu cortex-a57 " if machine == "aarch64" else ""
        python = root / "usr/bin/python"
        script(python, f'exec {emulator}{loader} --library-path {loader.parent} --argv0 {python} {python}3.13 "$@"')
    (headers,) = (apt / "debs").glob(f"lib{PYTHON}-dev_*_arm64.deb")
    subprocess.run(["dpkg", "-x", headers, BUILD / "x86_64"], check=True)
    (BUILD / "unpacked").touch()


def build(machine: str, glibc: str, jobs: int) -> Path:
    """Build, repair and check the wheel of one architecture."""
    for tool in ("ar", "ranlib"):
        script(BUILD / "tools" / tool, f'exec {SITE}/ziglang/zig {tool} "$@"')
    env = os.environ | {
        "ZIG": f"{SITE}/ziglang/zig",
        "ZIG_TARGET": f"{machine}-linux-gnu.{glibc}",
        "ZIG_TOOLS": f"{BUILD}/tools",
        "ZIG_HEADERS": f"{BUILD}/x86_64/usr/include",
        "CMAKE_TOOLCHAIN_FILE": str(Path(__file__).with_name("zig.cmake").resolve()),
        "CMAKE_BUILD_PARALLEL_LEVEL": str(jobs),
        "NANOINFER_ISA": "all",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(SITE),
        "_PYTHON_HOST_PLATFORM": f"linux-{machine}",
    }
    raw = BUILD / "raw" / machine
    raw.mkdir(parents=True, exist_ok=True)
    code = f"from scikit_build_core.build import build_wheel; print(build_wheel({str(raw)!r}))"
    begin = time.monotonic()
    subprocess.run([BUILD / "x86_64/usr/bin/python", "-c", code], env=env, check=True)
    print(f"{machine}: compiled in {time.monotonic() - begin:.0f} s", flush=True)
    (wheel,) = raw.glob("*.whl")
    tool = [sys.executable, "-m"]
    env["AUDITWHEEL_PLAT"] = "auto"  # the oldest that the symbols permit: --plat takes those of this machine alone
    subprocess.run([*tool, "auditwheel", "repair", "-w", "dist", wheel], env=env, check=True)
    (repaired,) = Path("dist").glob(f"*manylinux*_{machine}.whl")
    subprocess.run([*tool, "abi3audit", "--strict", "--report", repaired], check=True)
    print(f"{repaired}: {repaired.stat().st_size / 1e6:.1f} MB", flush=True)
    return repaired


def main() -> None:
    """Build the wheels of the architectures in the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("machines", nargs="*", default=list(ARCHITECTURES))
    parser.add_argument("--glibc", default="2.28")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    unpack_pythons()
    for machine in args.machines:
        build(machine, args.glibc, args.jobs)


if __name__ == "__main__":
    main()
