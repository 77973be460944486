/* Stand-in for the NVIDIA driver's libnvidia-ml.so.1: answers the calls of agents/collectors/nvml.py from the environment.
 *
 * STUB_GPUS   how many GPUs there are          STUB_LOST        index of a GPU that is lost, -1 none
 * STUB_INIT   code that nvmlInit returns       STUB_UNSUPPORTED index of a GPU that supports only temperature, -1 none
 * STUB_CALLS  a file that gets one byte per call of nvmlDeviceGetPowerUsage
 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, NOT_SUPPORTED = 3, GPU_IS_LOST = 15 };

typedef struct { int index; } device;
typedef struct { unsigned gpu, memory; } utilization;
typedef struct { unsigned long long total, free, used; } memory;

static device devices[64];

static int number(const char *name, int otherwise) {
    const char *text = getenv(name);
    return text ? atoi(text) : otherwise;
}

static int state(device *d) {
    if (d->index == number("STUB_LOST", -1)) return GPU_IS_LOST;
    if (d->index == number("STUB_UNSUPPORTED", -1)) return NOT_SUPPORTED;
    return SUCCESS;
}

#define ANSWER(d, target, value)              \
    do {                                      \
        int code = state(d);                  \
        if (code == SUCCESS) *(target) = (value); \
        return code;                          \
    } while (0)

int nvmlInitWithFlags(unsigned flags) { (void)flags; return number("STUB_INIT", SUCCESS); }
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int code) { return code == GPU_IS_LOST ? "GPU is lost" : "some error"; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { snprintf(text, size, "590.48.01"); return SUCCESS; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = (unsigned)number("STUB_GPUS", 2); return SUCCESS; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, device **d) {
    devices[index].index = (int)index;
    *d = &devices[index];
    return SUCCESS;
}
int nvmlDeviceGetName(device *d, char *text, unsigned size) {
    if (state(d) == GPU_IS_LOST) return GPU_IS_LOST;
    snprintf(text, size, "NVIDIA H100 80GB HBM3");
    return SUCCESS;
}
int nvmlDeviceGetSerial(device *d, char *text, unsigned size) { snprintf(text, size, "16500%d", d->index); return SUCCESS; }
int nvmlDeviceGetUUID(device *d, char *text, unsigned size) { snprintf(text, size, "GPU-%d", d->index); return SUCCESS; }
int nvmlDeviceGetUtilizationRates(device *d, utilization *found) {
    utilization value = {87, 41};
    ANSWER(d, found, value);
}
int nvmlDeviceGetMemoryInfo(device *d, memory *found) {
    memory value = {85899345920ULL, 1024, 85899344896ULL};
    ANSWER(d, found, value);
}
int nvmlDeviceGetClockInfo(device *d, int kind, unsigned *found) { ANSWER(d, found, kind == 1 ? 1980u : 2619u); }
int nvmlDeviceGetCurrentClocksEventReasons(device *d, unsigned long long *found) { ANSWER(d, found, 0x40ULL); }
int nvmlDeviceGetTemperature(device *d, int sensor, unsigned *found) {
    (void)sensor;
    if (state(d) == GPU_IS_LOST) return GPU_IS_LOST;
    *found = 40u + (unsigned)d->index;
    return SUCCESS;
}
int nvmlDeviceGetPowerUsage(device *d, unsigned *found) {
    const char *path = getenv("STUB_CALLS");
    int handle = path ? open(path, O_WRONLY | O_CREAT | O_APPEND, 0600) : -1;
    if (handle >= 0 && write(handle, "x", 1) == 1) close(handle);
    ANSWER(d, found, 512345u);
}
int nvmlDeviceGetTotalEnergyConsumption(device *d, unsigned long long *found) { ANSWER(d, found, 9007199254740993ULL); }
int nvmlDeviceGetTotalEccErrors(device *d, int kind, int counter, unsigned long long *found) {
    ANSWER(d, found, counter == 0 ? (kind == 0 ? 7ULL : 2ULL) : 99ULL);
}
int nvmlDeviceGetCurrPcieLinkGeneration(device *d, unsigned *found) { ANSWER(d, found, 5u); }
int nvmlDeviceGetCurrPcieLinkWidth(device *d, unsigned *found) { ANSWER(d, found, 16u); }
int nvmlDeviceGetPcieReplayCounter(device *d, unsigned *found) { ANSWER(d, found, 3u); }
