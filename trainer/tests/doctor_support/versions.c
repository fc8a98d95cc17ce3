/* All that `trainer doctor` calls of NVRTC and of NCCL, for libraries that are made up. */
#include <stdlib.h>
#include <string.h>

int nvrtcVersion(int *major, int *minor) { *major = 13, *minor = 2; return 0; }
int ncclGetVersion(int *version) { *version = 22907; return 0; }

/* What NVRTC makes of the doctor's kernel. FAKE_NVRTC_LOG is the message of a compiler that refuses it. */
static const char ptx[] =
    ".version 6.4\n.target sm_50\n.address_size 64\n"
    ".visible .entry write(.param .u64 address, .param .u32 count, .param .u32 seed, .param .u64 result)\n{\n"
    ".reg .pred %p<2>;\n.reg .b32 %r<8>;\n.reg .b64 %d<4>;\n"
    "ld.param.u64 %d1, [address];\nld.param.u32 %r1, [count];\nld.param.u32 %r2, [seed];\n"
    "mov.u32 %r3, %ctaid.x;\nmov.u32 %r4, %ntid.x;\nmov.u32 %r5, %tid.x;\nmad.lo.u32 %r6, %r3, %r4, %r5;\n"
    "setp.ge.u32 %p1, %r6, %r1;\n@%p1 bra DONE;\nmul.lo.u32 %r7, %r6, 2654435761;\nxor.b32 %r7, %r7, %r2;\n"
    "mul.wide.u32 %d2, %r6, 4;\nadd.u64 %d3, %d1, %d2;\nst.global.u32 [%d3], %r7;\nDONE:\nret;\n}\n";
static const char *refusal(void) { return getenv("FAKE_NVRTC_LOG"); }
static int copy(char *to, const char *text) { strcpy(to, text); return 0; }

int nvrtcCreateProgram(void **program, const char *source, const char *name, int headers, const char **texts, const char **names) {
    *program = strstr(source, "cuda_fp16.h") ? (void *)ptx : 0;
    return *program ? 0 : 1;
}
int nvrtcCompileProgram(void *program, int count, const char **options) { return refusal() ? 6 : 0; }
int nvrtcGetProgramLogSize(void *program, size_t *bytes) { *bytes = strlen(refusal()) + 1; return 0; }
int nvrtcGetProgramLog(void *program, char *to) { return copy(to, refusal()); }
int nvrtcGetPTXSize(void *program, size_t *bytes) { *bytes = sizeof ptx; return 0; }
int nvrtcGetPTX(void *program, char *to) { return copy(to, ptx); }
int nvrtcDestroyProgram(void **program) { return 0; }
