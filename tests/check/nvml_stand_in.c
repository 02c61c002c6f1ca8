/* Stands in for the driver's libnvidia-ml.so.1: one card that answers some calls, so that the real binding has something to
 * call. NVML_INIT: "hang" never returns, "mismatch" is a driver of another version than the library. No card was asked. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { OK = 0, MISMATCH = 18 };
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned pid; unsigned long long used_bytes; unsigned gpu_instance, compute_instance; } Process;

int nvmlInitWithFlags(unsigned flags) {
    const char *how = getenv("NVML_INIT");
    while (how && !strcmp(how, "hang")) pause();
    return how && !strcmp(how, "mismatch") ? MISMATCH : OK;
}
int nvmlShutdown(void) { return OK; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { strncpy(text, "570.133.07", size); return OK; }
int nvmlSystemGetCudaDriverVersion(int *version) { *version = 12080; return OK; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 1; return OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **card) { *card = (void *)(long)(index + 1); return OK; }
int nvmlDeviceGetUUID(void *card, char *text, unsigned size) { strncpy(text, "GPU-5090", size); return OK; }
int nvmlDeviceGetName(void *card, char *text, unsigned size) { strncpy(text, "NVIDIA GeForce RTX 5090", size); return OK; }
int nvmlDeviceGetCudaComputeCapability(void *card, int *major, int *minor) { *major = 12; *minor = 0; return OK; }
int nvmlDeviceGetMemoryInfo(void *card, Memory *memory) {
    *memory = (Memory){32ULL << 30, 8ULL << 30, 24ULL << 30};
    return OK;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *card, unsigned *count, Process *processes) {
    if (!processes) { *count = 1; return 7; /* too small */ }
    *count = 1;
    processes[0] = (Process){(unsigned)getppid(), 24ULL << 30, 0, 0};
    return OK;
}
int nvmlDeviceGetPowerUsage(void *card, unsigned *milliwatts) { *milliwatts = 431500; return OK; }
int nvmlDeviceGetCurrPcieLinkWidth(void *card, unsigned *width) { *width = 4; return OK; }
int nvmlDeviceGetMaxPcieLinkWidth(void *card, unsigned *width) { *width = 16; return OK; }
