/* All that `trainer doctor` calls of NVRTC and of NCCL, for libraries of theirs that are made up. */
int nvrtcVersion(int *major, int *minor) { *major = 13, *minor = 2; return 0; }
int ncclGetVersion(int *version) { *version = 22907; return 0; }
