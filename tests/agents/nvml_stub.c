/* Stand-in for the NVIDIA driver's libnvidia-ml.so.1: a machine of GPUs with configurable behavior.
 *
 * Its settings are lines: the environment's STUB (lines separated by `;`) and the file named by STUB_CONTROL, which is
 * read again whenever it changes, so that a test can break a GPU while a collector runs. GPU is a physical index, or * for all.
 *
 *   gpus N                        how many GPUs are fitted (8)
 *   links N                       NVLinks of each GPU (18)
 *   arch hopper|blackwell|ampere  which fields and calls there are (hopper); `all`: every one of them
 *   driver VERSION                what the driver calls itself (590.48.01)
 *   init CODE                     what nvmlInit returns
 *   lost GPU                      answers NVML_ERROR_GPU_IS_LOST (15) to everything
 *   removed GPU                   is not counted any more, from the next nvmlInit on; the indexes after it move down
 *   mig GPU                       is in MIG mode
 *   hang FUNCTION MS [GPU]        the call takes MS milliseconds more; -1: for ever
 *   fail FUNCTION CODE [GPU]      the call returns CODE
 *   field ID CODE [GPU]           nvmlReturn of one field
 *   set NAME VALUE [GPU]          what a call or a field (by number) answers in place of its usual value
 *   spoils 1                      as on an H100: counters of a link to a CPU that it lacks make others of their call fail
 *   chassis 0                     there is no chassis serial number and no GUID, as in a virtual machine
 *   garbage SEED [FUNCTION]       random bytes in place of answers
 * FUNCTION is the exported name, without its _v2 if one likes, or * for all.
 *
 *   STUB_CALLS   a file that gets one line per call, `FUNCTION GPU COUNT`: GPU -1 where there is none, COUNT the number
 *                of fields or metrics asked for, else 1
 *   STUB_EVENTS  a file that grows or a FIFO, read by nvmlEventSetWait_v2: one line per event,
 *                `gpu_index event_type event_data [gpu_instance compute_instance]`, numbers in decimal or 0x...; an XID 79
 *                of GPU 3 is `3 8 79`. Each event set reads it from the start; events of GPUs or types that were not
 *                registered are left out. `error CODE` makes the wait return CODE once.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7, TIMEOUT = 10, LOST = 15 };
enum { MOST_GPUS = 64, MOST_RULES = 256 };
typedef unsigned long long u64;

typedef struct { int index; } device;
typedef struct { char verb[16], name[64]; long long value; int gpu; } rule;

static device devices[MOST_GPUS];
static int attached[MOST_GPUS], attached_count, initialised;
static rule rules[MOST_RULES];
static int rule_count, loaded;
static struct timespec control_time;
static off_t control_size = -1;
static u64 seed_state = 1;

/* --- what it was told ------------------------------------------------------------------------------------------- */

static int target(const char *word) { return word[0] == '\0' || word[0] == '*' ? -1 : atoi(word); }

static void parse(char *line) {
    char verb[16] = "", a[64] = "", b[64] = "", c[64] = "";
    int words = sscanf(line, "%15s %63s %63s %63s", verb, a, b, c);
    if (words < 2 || verb[0] == '#' || rule_count == MOST_RULES) return;
    rule *r = &rules[rule_count++];
    memset(r, 0, sizeof *r);
    strcpy(r->verb, verb);
    r->gpu = -1;
    if (!strcmp(verb, "lost") || !strcmp(verb, "removed") || !strcmp(verb, "mig")) r->gpu = target(a);
    else if (!strcmp(verb, "arch") || !strcmp(verb, "driver")) strcpy(r->name, a);
    else if (!strcmp(verb, "garbage")) {
        r->value = seed_state = strtoull(a, NULL, 0) * 2654435761u + 1;
        strcpy(r->name, words > 2 ? b : "*");
    } else if (words > 2) {
        strcpy(r->name, a);
        r->value = (long long)(b[0] == '-' ? (u64)strtoll(b, NULL, 0) : strtoull(b, NULL, 0));
        r->gpu = target(c);
    } else r->value = strtoll(a, NULL, 0);
}

static void parse_all(char *text, const char *separators) {
    char *rest = NULL;
    for (char *line = strtok_r(text, separators, &rest); line; line = strtok_r(NULL, separators, &rest)) parse(line);
}

static void load(void) {
    const char *path = getenv("STUB_CONTROL"), *told = getenv("STUB");
    struct stat found;
    int fresh = path && stat(path, &found) == 0 &&
        (found.st_size != control_size || memcmp(&found.st_mtim, &control_time, sizeof control_time));
    if (loaded && !fresh) return;
    loaded = 1;
    rule_count = 0;
    if (told) {
        char *copy = strdup(told);
        parse_all(copy, ";\n");
        free(copy);
    }
    if (!fresh) return;
    control_size = found.st_size;
    control_time = found.st_mtim;
    FILE *file = fopen(path, "r");
    if (!file) return;
    char line[256];
    while (fgets(line, sizeof line, file)) parse(line);
    fclose(file);
}

static int named(const rule *r, const char *function) {
    size_t length = strlen(r->name);
    if (!strcmp(r->name, "*") || !strcmp(r->name, function)) return 1;
    return !strncmp(r->name, function, length) && !strncmp(function + length, "_v", 2);
}

/* The last rule that fits. */
static rule *told(const char *verb, const char *function, int gpu) {
    for (int i = rule_count - 1; i >= 0; i--) {
        rule *r = &rules[i];
        if (strcmp(r->verb, verb) || (r->gpu >= 0 && r->gpu != gpu)) continue;
        if (!function || named(r, function)) return r;
    }
    return NULL;
}

static int number(const char *verb, int otherwise) {
    rule *r = told(verb, NULL, -1);
    return r ? (int)r->value : otherwise;
}

static int is_arch(const char *name) {
    rule *r = told("arch", NULL, -1);
    return !strcmp(r ? r->name : "hopper", name) || (r && !strcmp(r->name, "all"));
}

static int before_hopper(void) {
    rule *r = told("arch", NULL, -1);
    return r && !strcmp(r->name, "ampere");
}

static u64 set_or(const char *name, int gpu, u64 otherwise) {
    rule *r = told("set", name, gpu);
    return r ? (u64)r->value : otherwise;
}

/* --- every call ------------------------------------------------------------------------------------------------- */

static u64 chance(void) { /* xorshift64 */
    seed_state ^= seed_state << 13;
    seed_state ^= seed_state >> 7;
    return seed_state ^= seed_state << 17;
}

static void note(const char *function, int gpu, int count) {
    static int handle = -2;
    static pid_t owner;
    const char *path = getenv("STUB_CALLS");
    if (!path) return;
    if (handle == -2 || owner != getpid()) handle = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600), owner = getpid();
    char line[128];
    int length = snprintf(line, sizeof line, "%s %d %d\n", function, gpu, count);
    if (handle >= 0 && write(handle, line, (size_t)length) < 0) handle = -2;
}

static void pass(long long milliseconds) {
    while (milliseconds < 0) pause();
    struct timespec span = {milliseconds / 1000, milliseconds % 1000 * 1000000};
    nanosleep(&span, NULL);
}

static int enter_n(const char *function, int gpu, int count) {
    load();
    note(function, gpu, count);
    rule *r = told("hang", function, gpu);
    if (r) pass(r->value);
    if ((r = told("fail", function, gpu))) return (int)r->value;
    if (!initialised && strncmp(function, "nvmlInit", 8)) return UNINITIALIZED;
    return gpu >= 0 && told("lost", NULL, gpu) ? LOST : SUCCESS;
}

/* Writes an answer, or random bytes of its size. */
static int put(const char *function, void *target, const void *value, size_t size) {
    if (!target) return INVALID;
    rule *r = told("garbage", function, -1);
    if (!r) memcpy(target, value, size);
    else for (size_t i = 0; i < size; i++) ((unsigned char *)target)[i] = (unsigned char)chance();
    return SUCCESS;
}

#define ENTER(d) do { int code = enter_n(__func__, (d)->index, 1); if (code) return code; } while (0)
#define ENTER_NONE() do { int code = enter_n(__func__, -1, 1); if (code) return code; } while (0)
#define NEEDS(fits) do { if (!(fits)) return NOT_SUPPORTED; } while (0)
#define PUT(pointer, value) put(__func__, (pointer), &(value), sizeof(value))
#define NUMBER(name, type, arguments, otherwise)                              \
    int name arguments {                                                      \
        ENTER(d);                                                             \
        type value = (type)set_or(__func__, d->index, (u64)(otherwise));      \
        return PUT(found, value);                                             \
    }
#define TEXT(name, ...)                                                       \
    int name(device *d, char *found, unsigned size) {                         \
        ENTER(d);                                                             \
        char value[96];                                                       \
        snprintf(value, sizeof value, __VA_ARGS__);                           \
        if (strlen(value) >= size) return TOO_SMALL;                          \
        put(__func__, found, value, strlen(value) + 1);                       \
        found[strlen(value)] = 0;                                             \
        return SUCCESS;                                                       \
    }

/* --- library ---------------------------------------------------------------------------------------------------- */

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    ENTER_NONE();
    int code = number("init", SUCCESS);
    if (code) return code;
    if (initialised++ == 0) {
        attached_count = 0;
        for (int i = 0; i < number("gpus", 8) && i < MOST_GPUS; i++)
            if (!told("removed", NULL, i)) attached[attached_count++] = i;
    }
    return SUCCESS;
}
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { ENTER_NONE(); initialised--; return SUCCESS; }
const char *nvmlErrorString(int code) { return code == LOST ? "GPU is lost" : "some error"; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) {
    ENTER_NONE();
    rule *r = told("driver", NULL, -1);
    snprintf(text, size, "%s", r ? r->name : "590.48.01");
    return SUCCESS;
}
int nvmlSystemGetNVMLVersion(char *text, unsigned size) { ENTER_NONE(); snprintf(text, size, "13.590.48.01"); return SUCCESS; }
int nvmlSystemGetCudaDriverVersion_v2(int *found) { ENTER_NONE(); int value = 13010; return PUT(found, value); }
int nvmlDeviceGetCount_v2(unsigned *found) {
    ENTER_NONE();
    unsigned value = (unsigned)set_or(__func__, -1, (u64)attached_count);
    return PUT(found, value);
}
static int handle_of(int gpu, device **d) {
    devices[gpu].index = gpu;
    *d = &devices[gpu];
    return told("lost", NULL, gpu) ? LOST : SUCCESS;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, device **d) {
    ENTER_NONE();
    return index < (unsigned)attached_count ? handle_of(attached[index], d) : INVALID;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, device **d) {
    ENTER_NONE();
    unsigned domain, number;
    if (sscanf(bus, "%x:%x:", &domain, &number) != 2) return INVALID;
    for (int i = 0; i < attached_count; i++)
        if (0x10u + 8u * (unsigned)attached[i] == number) return handle_of(attached[i], d);
    return NOT_FOUND;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, device **d) {
    ENTER_NONE();
    for (int i = 0; i < attached_count; i++)
        if (!strncmp(uuid, "GPU-", 4) && atoi(uuid + 4) == attached[i]) return handle_of(attached[i], d);
    return NOT_FOUND;
}

/* --- who a GPU is ----------------------------------------------------------------------------------------------- */

TEXT(nvmlDeviceGetName, "NVIDIA H100 80GB HBM3")
TEXT(nvmlDeviceGetSerial, "16500%d", d->index)
TEXT(nvmlDeviceGetUUID, "GPU-%d", d->index)
TEXT(nvmlDeviceGetVbiosVersion, "96.00.A5.00.01")
TEXT(nvmlDeviceGetInforomImageVersion, "G520.0200.00.05")
TEXT(nvmlDeviceGetBoardPartNumber, "692-2G520-0200-000")
int nvmlDeviceGetGspFirmwareVersion(device *d, char *found) { ENTER(d); char value[] = "590.48.01"; return PUT(found, value); }
int nvmlDeviceValidateInforom(device *d) { ENTER(d); return SUCCESS; }
NUMBER(nvmlDeviceGetMinorNumber, unsigned, (device *d, unsigned *found), d->index)
int nvmlDeviceGetIndex(device *d, unsigned *found) {
    ENTER(d);
    unsigned value = 0;
    while (value < (unsigned)attached_count && attached[value] != d->index) value++;
    return PUT(found, value);
}
typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char text[32]; } pci_info;
int nvmlDeviceGetPciInfo_v3(device *d, pci_info *found) {
    ENTER(d);
    pci_info value = {.bus = 0x10u + 8u * (unsigned)d->index, .id = 0x233010DE, .subsystem = 0x16C110DE};
    snprintf(value.legacy, sizeof value.legacy, "0000:%02X:00.0", value.bus);
    snprintf(value.text, sizeof value.text, "00000000:%02X:00.0", value.bus);
    return PUT(found, value);
}
int nvmlDeviceGetMigMode(device *d, unsigned *current, unsigned *pending) {
    ENTER(d);
    unsigned value = told("mig", NULL, d->index) != NULL;
    PUT(current, value);
    return PUT(pending, value);
}
NUMBER(nvmlDeviceGetComputeMode, int, (device *d, int *found), 0)
NUMBER(nvmlDeviceGetVirtualizationMode, unsigned, (device *d, unsigned *found), 0)
int nvmlDeviceGetHostVgpuMode(device *d, unsigned *found) {
    ENTER(d);
    NEEDS(told("set", __func__, d->index));
    unsigned value = (unsigned)set_or(__func__, d->index, 0);
    return PUT(found, value);
}
typedef struct { unsigned version; char guid[16], chassis[16]; unsigned char slot, tray, host, peer, module; } platform;
int nvmlDeviceGetPlatformInfo(device *d, platform *found) {
    ENTER(d);
    NEEDS(!before_hopper());
    platform value = {found->version, "\x0a\x1b\x2c\x3d\x4e\x5f\x60\x71\x82\x93\xa4\xb5\xc6\xd7\xe8", "SN1234567890", 5, 3, 1, 1, 0};
    value.guid[15] = (char)d->index;
    value.module = (unsigned char)(d->index + 1);
    if (!number("chassis", 1)) value = (platform){found->version, "", "", 0, 0, 1, 0, value.module};
    return PUT(found, value);
}
int nvmlDeviceGetComputeRunningProcesses_v3(device *d, unsigned *count, void *list) {
    ENTER(d);
    struct { unsigned pid; u64 memory; unsigned gpu, compute; } process = {0, 1 << 30, ~0u, ~0u};
    unsigned value = (unsigned)set_or(__func__, d->index, 2), room = *count;
    PUT(count, value);
    if (value > room || !list) return value ? TOO_SMALL : SUCCESS;
    for (unsigned i = 0; i < value; i++) {
        process.pid = 1000u + 10u * (unsigned)d->index + i;
        put(__func__, (char *)list + i * sizeof process, &process, sizeof process);
    }
    return SUCCESS;
}

/* --- values, one call each -------------------------------------------------------------------------------------- */

typedef struct { unsigned gpu, memory; } utilization;
int nvmlDeviceGetUtilizationRates(device *d, utilization *found) {
    ENTER(d);
    NEEDS(!told("mig", NULL, d->index));
    utilization value = {(unsigned)set_or(__func__, d->index, 87), 41};
    return PUT(found, value);
}
typedef struct { u64 total, free, used; } memory;
int nvmlDeviceGetMemoryInfo(device *d, memory *found) {
    ENTER(d);
    memory value = {85899345920ULL, 1024, (u64)set_or(__func__, d->index, 85899344896LL)};
    return PUT(found, value);
}
typedef struct { unsigned version; u64 total, reserved, free, used; } memory2;
int nvmlDeviceGetMemoryInfo_v2(device *d, memory2 *found) {
    ENTER(d);
    memory2 value = {found->version, 85899345920ULL, 536870912ULL, 1024, 85362474000ULL};
    return PUT(found, value);
}
NUMBER(nvmlDeviceGetClockInfo, unsigned, (device *d, int kind, unsigned *found), kind == 2 ? 2619 : 1755)
NUMBER(nvmlDeviceGetMaxClockInfo, unsigned, (device *d, int kind, unsigned *found), kind == 2 ? 2620 : 1980)
NUMBER(nvmlDeviceGetCurrentClocksEventReasons, u64, (device *d, u64 *found), 0x40)
NUMBER(nvmlDeviceGetTemperature, unsigned, (device *d, int sensor, unsigned *found), 40 + d->index + 0 * sensor)
typedef struct { unsigned version; int sensor, temperature; } temperature;
int nvmlDeviceGetTemperatureV(device *d, temperature *found) {
    ENTER(d);
    temperature value = {found->version, found->sensor, (int)set_or(__func__, d->index, 40u + (unsigned)d->index)};
    return PUT(found, value);
}
typedef struct { unsigned version; int margin; } margin;
int nvmlDeviceGetMarginTemperature(device *d, margin *found) {
    ENTER(d);
    NEEDS(!before_hopper());
    margin value = {found->version, (int)set_or(__func__, d->index, (u64)(46 - d->index))};
    return PUT(found, value);
}
NUMBER(nvmlDeviceGetPowerUsage, unsigned, (device *d, unsigned *found), 512345)
NUMBER(nvmlDeviceGetEnforcedPowerLimit, unsigned, (device *d, unsigned *found), 690000)
NUMBER(nvmlDeviceGetTotalEnergyConsumption, u64, (device *d, u64 *found), 9007199254740993ULL)
NUMBER(nvmlDeviceGetTotalEccErrors, u64, (device *d, int kind, int counter, u64 *found),
       counter ? (kind ? 99 : 98) : (kind ? 2 : 7))
NUMBER(nvmlDeviceGetMemoryErrorCounter, u64, (device *d, int kind, int counter, int place, u64 *found),
       1000 * place + 100 * counter + 10 * kind + d->index)
typedef struct { unsigned version; u64 counts[11]; unsigned exceeded; } sram;
int nvmlDeviceGetSramEccErrorStatus(device *d, sram *found) {
    ENTER(d);
    NEEDS(!before_hopper());
    sram value = {.version = found->version, .exceeded = (unsigned)set_or(__func__, d->index, 0)};
    for (int i = 0; i < 11; i++) value.counts[i] = 500u + (unsigned)i;
    return PUT(found, value);
}
int nvmlDeviceGetRemappedRows(device *d, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed) {
    ENTER(d);
    unsigned values[] = {3, 1, 0, 0};
    PUT(corrected, values[0]);
    PUT(uncorrected, values[1]);
    PUT(pending, values[2]);
    return PUT(failed, values[3]);
}
int nvmlDeviceGetRowRemapperHistogram(device *d, unsigned *found) {
    ENTER(d);
    unsigned value[] = {2554, 3, 2, 1, 0};
    return PUT(found, value);
}
int nvmlDeviceGetRetiredPages(device *d, int cause, unsigned *count, u64 *pages) {
    (void)pages;
    ENTER(d);
    NEEDS(is_arch("ampere") );
    unsigned value = cause ? 2 : 1;
    return PUT(count, value);
}
typedef struct { unsigned version, flag; } flag;
int nvmlDeviceGetUnrepairableMemoryFlag_v1(device *d, flag *found) {
    ENTER(d);
    flag value = {found->version, (unsigned)set_or(__func__, d->index, 0)};
    return PUT(found, value);
}
typedef struct { unsigned version, channel, tpc; } repair;
int nvmlDeviceGetRepairStatus(device *d, repair *found) { ENTER(d); repair value = {found->version, 0, 0}; return PUT(found, value); }
NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, unsigned, (device *d, unsigned *found), 5)
NUMBER(nvmlDeviceGetCurrPcieLinkWidth, unsigned, (device *d, unsigned *found), 16)
NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, unsigned, (device *d, unsigned *found), 5)
NUMBER(nvmlDeviceGetMaxPcieLinkWidth, unsigned, (device *d, unsigned *found), 16)
NUMBER(nvmlDeviceGetPcieReplayCounter, unsigned, (device *d, unsigned *found), 3)
int nvmlDeviceGetNvLinkState(device *d, unsigned link, unsigned *found) {
    ENTER(d);
    if (link >= (unsigned)number("links", 18)) return INVALID;
    unsigned value = (unsigned)set_or(__func__, d->index, 1);
    return PUT(found, value);
}
NUMBER(nvmlDeviceGetNvLinkErrorCounter, u64, (device *d, unsigned link, int counter, u64 *found), 100 * counter + link)
typedef struct { unsigned version; unsigned char uuid[16]; int status; unsigned clique, state, mask; unsigned char summary; } fabric;
int nvmlDeviceGetGpuFabricInfoV(device *d, fabric *found) {
    ENTER(d);
    NEEDS(!before_hopper());
    size_t size = found->version & 0xffffff;
    fabric value = {found->version, {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}, 0, 32766, 3, 0x2aa, 1};
    if (size > sizeof value) return 25; /* NVML_ERROR_ARGUMENT_VERSION_MISMATCH */
    value.mask = (unsigned)set_or("fabric_mask", d->index, value.mask);
    value.state = (unsigned)set_or("fabric_state", d->index, value.state);
    return put(__func__, found, &value, size);
}

/* --- fields: one call, many values ------------------------------------------------------------------------------ */

typedef struct { unsigned id, scope; long long time, latency; int type, code; u64 value; } field_value;

/* How often each id is there: counters are ID * 1000000 + GPU * 1000 + scope. */
static u64 usual(unsigned id, unsigned scope, u64 gpu, int *type) {
    *type = 3;
    if (id >= 185 && id <= 192) *type = 1;
    if (id >= 193 && id <= 196) *type = 5;
    switch (id) {
    case 82: *type = 1; return 50 + gpu;
    case 83: return 9007199254740993ULL;
    case 91: *type = 1; return (u64)number("links", 18);
    case 94: *type = 1; return 3;
    case 144: case 145: *type = 1; return 0;
    case 142: case 143: *type = 1; return id - 140 + gpu;
    case 164: *type = 1; return 26562;
    case 165: case 171: *type = 1; return 1;
    case 170: *type = 1; return 1;
    case 172: *type = 1; return 450000;
    case 31: *type = 1; return 0;
    case 185: return 500000 + 1000 * gpu;
    case 186: return 512345 + 1000 * gpu;
    case 187: return 200000;
    case 188: case 189: return 700000;
    case 190: return 690000;
    case 192: return 650000;
    case 193: return (u64)-8;
    case 194: return (u64)-2;
    case 195: case 196: return 0;
    case 220: return 15 << 8 | 255; /* 15e-255: none */
    case 222: return 3 << 8 | 12;   /* 3e-12 */
    case 230: case 234: *type = 1; return 0;
    case 258: *type = 1; return 99;
    case 293: return 5 << 8 | 9;
    }
    return (u64)id * 1000000 + gpu * 1000 + scope;
}

static int there(unsigned id, unsigned scope) {
    int linked = (id >= 161 && id <= 168) || (id >= 201 && id <= 222) || (id >= 235 && id <= 250) || (id >= 289 && id <= 296);
    if (id == 0 || id > 307) return 0;
    if (linked && scope >= (unsigned)number("links", 18)) return 0;
    if ((id >= 170 && id <= 172) || (id >= 231 && id <= 234) || (id >= 201 && id <= 222 && id != 202 && id != 204))
        return is_arch("blackwell");
    if ((id >= 235 && id <= 268) || id >= 275) return is_arch("blackwell");
    if (id >= 161 && id <= 163) return is_arch("hopper") || is_arch("ampere");
    if ((id >= 169 && id <= 204) || (id >= 269 && id <= 271)) return !before_hopper();
    return 1;
}

static int is_spoilt(unsigned id) {
    return (id >= 187 && id <= 189) || (id >= 192 && id <= 196) || id == 258 || id == 270 || id == 271;
}

int nvmlDeviceGetFieldValues(device *d, int count, field_value *values) {
    int code = enter_n(__func__, d->index, count);
    if (code) return code;
    rule *mess = told("garbage", __func__, -1);
    int spoilt = 0;
    for (int i = 0; number("spoils", 0) && i < count; i++) spoilt |= values[i].id == 231 && !there(231, 0);
    for (int i = 0; i < count; i++) {
        field_value *v = &values[i];
        char name[16];
        snprintf(name, sizeof name, "%u", v->id);
        u64 value = set_or(name, d->index, usual(v->id, v->scope, (u64)d->index, &v->type));
        rule *r = rule_count ? told("field", name, d->index) : NULL;
        v->time = 1;
        v->latency = 4;
        v->code = r ? (int)r->value : there(v->id, v->scope) ? SUCCESS : NOT_SUPPORTED;
        if (spoilt && is_spoilt(v->id)) v->code = 999;
        if (v->code == SUCCESS) {
            v->value = 0xffffffffffffffffULL; /* what a driver leaves in the part of the union that it does not write */
            memcpy(&v->value, &value, v->type == 1 || v->type == 5 ? 4 : 8);
        }
        if (mess) put(__func__, v, v, sizeof *v);
    }
    return SUCCESS;
}

/* --- GPM -------------------------------------------------------------------------------------------------------- */

typedef struct { int gpu, tick; } sample;
typedef struct { unsigned id; int code; double value; const char *names[3]; } metric;
typedef struct { unsigned version, count; sample *first, *second; metric metrics[]; } metrics;
static int gpm_tick, gpm_live;
int stub_gpm_samples(void) { return gpm_live; }
int nvmlGpmQueryDeviceSupport(device *d, unsigned *found) {
    ENTER(d);
    unsigned value[] = {found[0], !before_hopper()};
    return PUT(found, value);
}
int nvmlGpmSampleAlloc(sample **found) { ENTER_NONE(); *found = calloc(1, sizeof **found); gpm_live++; return SUCCESS; }
int nvmlGpmSampleFree(sample *s) { ENTER_NONE(); free(s); gpm_live--; return SUCCESS; }
int nvmlGpmSampleGet(device *d, sample *s) {
    ENTER(d);
    NEEDS(!told("mig", NULL, d->index));
    *s = (sample){d->index, ++gpm_tick};
    return SUCCESS;
}
int nvmlGpmMetricsGet(metrics *asked) {
    int gpu = asked->second->gpu, code = enter_n(__func__, gpu, (int)asked->count);
    if (code) return code;
    if (asked->first->gpu != gpu || asked->first->tick <= 0 || asked->first->tick >= asked->second->tick) return INVALID;
    for (unsigned i = 0; i < asked->count; i++) {
        metric *m = &asked->metrics[i];
        double value = m->id < 20 ? 5.0 * m->id + gpu : 100.0 * m->id + gpu;
        m->code = SUCCESS;
        put(__func__, &m->value, &value, sizeof value);
    }
    return SUCCESS;
}

/* --- events ----------------------------------------------------------------------------------------------------- */

typedef struct { int handle; u64 types[MOST_GPUS]; char line[256]; size_t length; } event_set;
typedef struct { device *d; u64 type, data; unsigned gpu_instance, compute_instance; } event_data;
int nvmlEventSetCreate(event_set **found) { ENTER_NONE(); *found = calloc(1, sizeof **found); (*found)->handle = -1; return SUCCESS; }
int nvmlEventSetFree(event_set *set) { ENTER_NONE(); if (set->handle >= 0) close(set->handle); free(set); return SUCCESS; }
NUMBER(nvmlDeviceGetSupportedEventTypes, u64, (device *d, u64 *found), 0xff9f)
int nvmlDeviceRegisterEvents(device *d, u64 types, event_set *set) { ENTER(d); set->types[d->index] |= types; return SUCCESS; }

/* One whole line of the source; 0 where there is none yet. */
static int next_line(event_set *set, char *line) {
    const char *path = getenv("STUB_EVENTS");
    if (set->handle < 0 && path) set->handle = open(path, O_RDWR | O_NONBLOCK | O_CLOEXEC); /* a FIFO: never at its end */
    char byte;
    while (set->handle >= 0 && set->length < sizeof set->line - 1 && read(set->handle, &byte, 1) == 1) {
        if (byte != '\n') { set->line[set->length++] = byte; continue; }
        memcpy(line, set->line, set->length);
        line[set->length] = 0;
        set->length = 0;
        return 1;
    }
    return 0;
}

int nvmlEventSetWait_v2(event_set *set, event_data *found, unsigned milliseconds) {
    ENTER_NONE();
    char line[256];
    for (unsigned waited = 0;; waited += 5) {
        while (next_line(set, line)) {
            int code = 0;
            long long gpu = 0;
            u64 type = 0, data = 0;
            unsigned parts[2] = {~0u, ~0u};
            if (sscanf(line, "error %d", &code) == 1) return code;
            if (sscanf(line, "%lli %lli %lli %u %u", &gpu, (long long *)&type, (long long *)&data, &parts[0], &parts[1]) < 3) continue;
            if (gpu < 0 || gpu >= MOST_GPUS || !(set->types[gpu] & type)) continue;
            devices[gpu].index = (int)gpu;
            *found = (event_data){&devices[gpu], type, data, parts[0], parts[1]};
            return SUCCESS;
        }
        if (waited >= milliseconds) return TIMEOUT;
        pass(5);
    }
}
int nvmlEventSetWait(event_set *set, event_data *found, unsigned milliseconds) { return nvmlEventSetWait_v2(set, found, milliseconds); }
