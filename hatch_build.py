"""Build hook: compile the native kernels into a wheel for Linux on x86-64.

HATCH_BUILD_HOOKS_ENABLE=1 enables it, as in `make release-check` and the Dockerfile. Without it, or
without a compiler, the wheel is a pure one, and the kernels are compiled when they are first used.
"""

import platform
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class KernelsHook(BuildHookInterface):
    """Adds the libraries of all levels to a wheel, which then is for one platform."""

    def dependencies(self) -> list[str]:
        """Return the package whose headers the kernels need."""
        return [line for line in self.metadata.core.dependencies if line.startswith("jaxlib")]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the kernels, unless the wheel only points to a checkout."""
        self._folder = Path(tempfile.mkdtemp(prefix="dflash-kernels-"))
        if version == "editable" or (sys.platform, platform.machine()) != ("linux", "x86_64"):
            return
        sys.path.insert(0, self.root)
        from dflash_jax.errors import NativeError
        from dflash_jax.kernels.native import compiling, shipped

        try:
            paths = shipped.write(self._folder, compiling.find_compiler())
        except NativeError as error:
            self.app.display_warning(f"the wheel has no compiled kernels: {error}")
            return
        inside = shipped.FOLDER.relative_to(self.root).as_posix()
        build_data["force_include"] |= {str(path): f"{inside}/{path.name}" for path in paths}
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform_tag(paths)}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the compiled files, which are in the wheel now."""
        shutil.rmtree(self._folder, ignore_errors=True)


def platform_tag(paths: list[Path]) -> str:
    """Return the tag (PEP 600) for the newest version of glibc that libraries need."""
    names = b"\n".join(path.read_bytes() for path in paths if path.suffix == ".so")
    found = [(int(a), int(b)) for a, b in re.findall(rb"GLIBC_(\d+)\.(\d+)", names)]
    return "manylinux_{}_{}_x86_64".format(*max(found)) if found else "linux_x86_64"
