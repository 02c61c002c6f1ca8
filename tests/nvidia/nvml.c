/* Stands in for the driver's libnvidia-ml.so.1. Every call reads the file that FAKE_CARDS names, so a test may change a card at any
 * moment. A line is `key = value`:
 *
 *   Init = error 18                       what nvmlInit answers; `hang` never returns
 *   Count = 2, DriverVersion = 570.133.07, CudaDriverVersion = 12080
 *   0.Name = NVIDIA GeForce RTX 5090      what nvmlDeviceGetName answers for card 0; numbers are separated by blanks
 *   1 = error 15                          every call about card 1, its handle included
 *   1.MemoryInfo = error 999              one call
 *   0/1.Name = ... MIG 1g.10gb           the MIG device 1 of card 0, of 0.MaxMigDeviceCount
 *   Xids = 0 79 1 31                      Xid errors since the driver was loaded: card and number
 *
 * A call without a line is not supported (3). Return codes are those of nvml.h. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { OK = 0, NOT_SUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7, TIMED_OUT = 10 };
enum { LINE = 4096, MAX_CARDS = 64, MAX_EVENTS = 128, POLL_US = 20000, PART = 1000 };
typedef void *Card; /* the index plus one; of a MIG device also PART times its own index plus one */
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned pid; unsigned long long used_bytes; unsigned gpu_instance, compute_instance; } Process;
typedef struct { unsigned gpu, memory; } Utilization;
typedef struct { Card card; unsigned long long type, data; unsigned gpu_instance, compute_instance; } Event;
typedef struct { int delivered; char cards[MAX_CARDS]; } EventSet;

static int find(const char *key, char *value) { /* OK, NOT_SUPPORTED where no line has the key, or the error of the line */
    char line[LINE], *path = getenv("FAKE_CARDS");
    FILE *file = path ? fopen(path, "r") : NULL;
    size_t length = strlen(key);
    int status = NOT_SUPPORTED;
    while (file && fgets(line, sizeof line, file)) {
        if (strncmp(line, key, length) || strncmp(line + length, " = ", 3)) continue;
        line[strcspn(line, "\n")] = 0;
        strcpy(value, line + length + 3);
        status = OK;
        sscanf(value, "error %d", &status);
    }
    if (file) fclose(file);
    return status;
}

static int number(const char *key) { char text[LINE]; return find(key, text) ? 0 : atoi(text); }
static int index_of(Card card) { return (int)(long)card - 1; }

static int ask(Card card, const char *name, char *value) {
    char key[256];
    int index = index_of(card) % PART, part = index_of(card) / PART;
    snprintf(key, sizeof key, "%d", index);
    int status = find(key, value);
    if (status != NOT_SUPPORTED) return status; /* the whole card answers an error */
    if (part) snprintf(key, sizeof key, "%d/%d.%s", index, part - 1, name);
    else snprintf(key, sizeof key, "%d.%s", index, name);
    return find(key, value);
}

static int text(int status, const char *value, char *answer, unsigned size) {
    if (!status) snprintf(answer, size, "%s", value);
    return status;
}

static int ask_number(Card card, const char *name, unsigned *answer) {
    char value[LINE];
    int status = ask(card, name, value);
    if (!status) *answer = strtoul(value, NULL, 10);
    return status;
}

static int ask_long(Card card, const char *name, unsigned long long *answer) {
    char value[LINE];
    int status = ask(card, name, value);
    if (!status) *answer = strtoull(value, NULL, 10);
    return status;
}

static int ask_two(Card card, const char *name, unsigned *first, unsigned *second) {
    char value[LINE];
    int status = ask(card, name, value);
    if (!status) sscanf(value, "%u %u", first, second);
    return status;
}

static int ask_processes(Card card, const char *name, unsigned *count, Process *processes) {
    char value[LINE] = "", *next = value;
    int status = ask(card, name, value);
    unsigned found = 0, room = *count;
    Process process = {0};
    for (int read; !status && sscanf(next, "%u %llu%n", &process.pid, &process.used_bytes, &read) == 2; next += read, found++)
        if (processes && found < room) processes[found] = process;
    *count = found;
    return status ? status : found > (processes ? room : 0) ? TOO_SMALL : OK;
}

int nvmlInitWithFlags(unsigned flags) {
    char value[LINE] = "";
    int status = find("Init", value);
    while (!strcmp(value, "hang")) pause();
    return status == NOT_SUPPORTED ? OK : status;
}
int nvmlShutdown(void) { return OK; }
int nvmlSystemGetDriverVersion(char *answer, unsigned size) {
    char value[LINE];
    return text(find("DriverVersion", value), value, answer, size);
}
int nvmlSystemGetCudaDriverVersion(int *version) { *version = number("CudaDriverVersion"); return OK; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = number("Count"); return OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, Card *card) {
    char value[LINE];
    *card = (Card)(long)(index + 1);
    int status = ask(*card, "HandleByIndex", value);
    return status == NOT_SUPPORTED ? OK : status;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, Card *card) {
    char value[LINE];
    for (long i = 1; i <= number("Count"); i++)
        if (*card = (Card)i, !ask(*card, "UUID", value) && !strcmp(value, uuid)) return OK;
    return NOT_FOUND;
}
int nvmlDeviceGetIndex(Card card, unsigned *index) { *index = index_of(card); return OK; }

#define TEXT(name) int nvmlDeviceGet##name(Card card, char *answer, unsigned size) { \
    char value[LINE]; return text(ask(card, #name, value), value, answer, size); }
#define NUMBER(name) int nvmlDeviceGet##name(Card card, unsigned *answer) { return ask_number(card, #name, answer); }
#define LONG(name) int nvmlDeviceGet##name(Card card, unsigned long long *answer) { return ask_long(card, #name, answer); }
#define TWO(name) int nvmlDeviceGet##name(Card card, unsigned *first, unsigned *second) { return ask_two(card, #name, first, second); }
#define OF_KIND(name) int nvmlDeviceGet##name(Card card, int kind, unsigned *answer) { return ask_number(card, #name, answer); }
#define PROCESSES(name) int nvmlDeviceGet##name(Card card, unsigned *count, Process *processes) { \
    return ask_processes(card, #name, count, processes); }

TEXT(Name) TEXT(UUID)
NUMBER(PowerUsage) NUMBER(EnforcedPowerLimit) NUMBER(PowerManagementLimit) NUMBER(PowerManagementDefaultLimit)
NUMBER(MaxMigDeviceCount) NUMBER(ComputeMode) NUMBER(DisplayActive) NUMBER(PcieReplayCounter)
NUMBER(CurrPcieLinkGeneration) NUMBER(MaxPcieLinkGeneration) NUMBER(CurrPcieLinkWidth) NUMBER(MaxPcieLinkWidth)
LONG(CurrentClocksEventReasons) LONG(CurrentClocksThrottleReasons) LONG(TotalEnergyConsumption)
TWO(CudaComputeCapability) TWO(EccMode) TWO(MigMode)
OF_KIND(Temperature) OF_KIND(ClockInfo) OF_KIND(NvLinkState) OF_KIND(PcieThroughput)
PROCESSES(ComputeRunningProcesses_v3) PROCESSES(ComputeRunningProcesses_v2)
PROCESSES(GraphicsRunningProcesses_v3) PROCESSES(GraphicsRunningProcesses_v2)

int nvmlDeviceGetMigDeviceHandleByIndex(Card card, unsigned index, Card *part) {
    char value[LINE];
    *part = (Card)((long)card + PART * (long)(index + 1));
    return ask(*part, "UUID", value) ? NOT_FOUND : OK;
}
int nvmlDeviceGetUtilizationRates(Card card, Utilization *use) { return ask_two(card, "UtilizationRates", &use->gpu, &use->memory); }
int nvmlDeviceGetP2PStatus(Card card, Card other, int kind, unsigned *status) { return ask_number(card, "P2PStatus", status); }
int nvmlDeviceGetMemoryInfo(Card card, Memory *memory) { /* total and used */
    char value[LINE];
    int status = ask(card, "MemoryInfo", value);
    if (!status && sscanf(value, "%llu %llu", &memory->total, &memory->used) == 2) memory->free = memory->total - memory->used;
    return status;
}
int nvmlDeviceGetTotalEccErrors(Card card, int uncorrected, int since, unsigned long long *count) {
    return ask_long(card, uncorrected ? "TotalEccErrors" : "CorrectedEccErrors", count);
}

static int read_xids(int *pairs) { /* how many events there were; pairs: card and number of each */
    char value[LINE] = "", *next = value;
    int count = 0;
    if (find("Xids", value)) return 0;
    for (int read; count < MAX_EVENTS && sscanf(next, "%d %d%n", pairs, pairs + 1, &read) == 2; count++, pairs += 2) next += read;
    return count;
}
int nvmlEventSetCreate(EventSet **set) {
    int pairs[2 * MAX_EVENTS];
    *set = calloc(1, sizeof(EventSet));
    (*set)->delivered = read_xids(pairs); /* those before it are not reported */
    return OK;
}
int nvmlDeviceRegisterEvents(Card card, unsigned long long types, EventSet *set) {
    char value[LINE];
    int status = ask(card, "RegisterEvents", value);
    if (status && status != NOT_SUPPORTED) return status;
    set->cards[index_of(card)] = 1;
    return OK;
}
int nvmlEventSetWait_v2(EventSet *set, Event *event, unsigned timeout_ms) {
    for (long left_us = 1000L * timeout_ms;; left_us -= POLL_US) {
        int pairs[2 * MAX_EVENTS], count = read_xids(pairs);
        while (set->delivered < count) {
            int *pair = pairs + 2 * set->delivered++;
            if (!set->cards[pair[0]]) continue;
            *event = (Event){(Card)(long)(pair[0] + 1), 8, pair[1], 0, 0};
            return OK;
        }
        if (left_us <= 0) return TIMED_OUT;
        usleep(POLL_US);
    }
}
