"""Compiles CUDA C++ with NVRTC, which needs no GPU: nvrtc.py NVRTC ARCH SOURCE… writes SOURCE.ptx beside each SOURCE.

NVRTC is the library's path, or "wheel" for that of the package nvidia-cuda-nvrtc in this Python. ARCH is compute_80, or sm_80 to
assemble the PTX too, which takes as long again."""
import ctypes
import glob
import sys

library, arch, *sources = sys.argv[1:]
if library == "wheel":
    found = [p for root in sys.path for p in glob.glob(f"{root}/nvidia/*/lib/libnvrtc.so.*")]
    if not found:
        sys.exit("this Python has no package nvidia-cuda-nvrtc")
    library = found[0]
nvrtc = ctypes.CDLL(library)


def check(code, program=None):
    if code == 0:
        return
    size = ctypes.c_size_t()
    if program and nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size)) == 0:
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        sys.stderr.write(log.value.decode())
    sys.exit(f"NVRTC error {code}")


for source in sources:
    program = ctypes.c_void_p()
    with open(source, "rb") as file:
        check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), file.read(), source.encode(), 0, None, None))
    # as cubecl calls it
    options = [f"--gpu-architecture={arch}".encode(), b"-lineinfo"]
    check(nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options)), program)
    size = ctypes.c_size_t()
    check(nvrtc.nvrtcGetPTXSize(program, ctypes.byref(size)))
    ptx = ctypes.create_string_buffer(size.value)
    check(nvrtc.nvrtcGetPTX(program, ptx))
    check(nvrtc.nvrtcDestroyProgram(ctypes.byref(program)))
    with open(f"{source}.ptx", "wb") as file:
        file.write(ptx.value)
