"""Puts empty stand-ins for the CUDA libraries that PyPI's torch is linked to beside it.

The CPU needs none of them, but the loader refuses torch without every library that its own name as
needed, with every symbol version that they bind to. A stand-in has those names and returns an error
from each. cuda_stubs.py TORCH_LIB_DIR
"""

import collections
import pathlib
import re
import subprocess
import sys
import tempfile

SYSTEM = re.compile(r"(lib(c|m|dl|rt|pthread|stdc\+\+|gcc_s|gomp)\.so|ld-linux)")
# Symbols that torch takes from CUDA without a version; any of the stand-ins may hold them.
CUDA_SYMBOL = re.compile(
    r"_*(cuda|cublas|cudnn|cusparse|cusolver|cufft|curand|nvrtc|nvtx|nvJit|nvml|nvshmem|nccl|cupti|cuFile|cu[A-Z])"
)
UNVERSIONED_HOME = "libcudart"


def readelf(*arguments):
    result = subprocess.run(["readelf", "-W", *arguments], capture_output=True, text=True, check=True)
    return result.stdout.splitlines()


class Needs:
    """What a set of shared objects wants from libraries that are not there."""

    def __init__(self):
        self.libraries = set()
        self.versions = collections.defaultdict(set)  # library -> versions
        self.symbols = collections.defaultdict(set)  # version -> symbols
        self.unversioned = set()
        self.defined = set()

    def read(self, path):
        for line in readelf("-d", path):
            if match := re.search(r"\(NEEDED\).*\[(.+)\]", line):
                self.libraries.add(match[1])
        library = None
        for line in readelf("-V", path):
            # A definition's header has "Version: 1  File" nowhere, a need's has the file's name.
            if match := re.search(r"Version: \d+\s+File: (\S+)", line):
                library = match[1]
            elif "section" in line:
                library = None
            elif library and (match := re.search(r"Name: (\S+)\s+Flags", line)):
                self.versions[library].add(match[1])
        for line in readelf("--dyn-syms", path):
            fields = line.split()
            if len(fields) < 8 or not fields[0].endswith(":"):
                continue
            name, _, version = fields[7].replace("@@", "@").partition("@")
            if fields[6] != "UND":
                self.defined.add(name)
            elif version:
                self.symbols[version].add(name)
            else:
                self.unversioned.add(name)


def stub(path, versions, unversioned):
    """versions: [(version or None, symbols)], in the order of the version script."""
    code, script, seen = [], [], set()
    for version, symbols in versions:
        fresh = sorted(symbols - seen)
        seen.update(fresh)
        code += fresh
        body = f"global: {' '.join(name + ';' for name in fresh)}" if fresh else ""
        script.append(f"{version} {{ {body} }};")
    code += sorted(unversioned - seen)
    with tempfile.TemporaryDirectory() as folder:
        source, map_file = pathlib.Path(folder, "stub.c"), pathlib.Path(folder, "stub.map")
        source.write_text("".join(f"int {name}(void) {{ return 100; }}\n" for name in code))
        map_file.write_text("\n".join(script) + "\n")
        command = ["gcc", "-shared", "-fPIC", "-w", "-fno-builtin", "-O0", "-o", path, source]
        command += [f"-Wl,-soname,{path.name}"]
        if versions:
            command.append(f"-Wl,--version-script={map_file}")
        subprocess.run(command, check=True)


def main(folder):
    folder = pathlib.Path(folder)
    objects = sorted(folder.glob("*.so*"))
    needs = Needs()
    for path in objects:
        needs.read(path)
    present = {path.name for path in objects}
    for name in sorted(needs.libraries - present):
        if SYSTEM.match(name):
            continue
        versions = [(version, needs.symbols[version]) for version in sorted(needs.versions[name])]
        unversioned = set()
        if name.startswith(UNVERSIONED_HOME):
            unversioned = {
                symbol for symbol in needs.unversioned - needs.defined if CUDA_SYMBOL.match(symbol)
            }
        stub(folder / name, versions, unversioned)
        print(name)


main(sys.argv[1])
