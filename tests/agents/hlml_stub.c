/* A libhlml.so of two accelerators for the real pyhlml to load: what the collector asks for. */
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

typedef uintptr_t device;
typedef struct { char speed[10], width[10]; } capabilities;
typedef struct { unsigned bus; char bus_id[15]; unsigned device, domain, ids; capabilities caps; } pci_info;
typedef struct { unsigned long long free, total, used; } memory;

#define FIRST 0x40
#define TEXT(name, value) int name(device d, char *text, unsigned size) { strncpy(text, value, size); return 0; }
#define NUMBER(name, type, value) int name(device d, type *found) { *found = (value); return 0; }

int hlml_init(void) { return 0; }
int hlml_shutdown(void) { return 0; }
int hlml_device_get_count(unsigned *count) { *count = 2; return 0; }
int hlml_device_get_handle_by_index(unsigned index, device *d) { *d = FIRST + index; return 0; }
int hlml_get_driver_version(char *text, unsigned size) { strncpy(text, "1.21.0-abcdef", size); return 0; }

TEXT(hlml_device_get_name, "HL-325L")
TEXT(hlml_device_get_serial, d == FIRST ? "AN70" : "AN71")
TEXT(hlml_device_get_uuid, "01P4")
NUMBER(hlml_device_get_power_usage, unsigned, 500000 + 1000 * (d - FIRST))
NUMBER(hlml_device_get_utilization_rates, unsigned, 77)
NUMBER(hlml_device_get_total_energy_consumption, unsigned long long, 1ULL << 53)
NUMBER(hlml_device_get_current_clocks_throttle_reasons, unsigned long long, 2)
NUMBER(hlml_device_get_pcie_replay_counter, unsigned, 4)
NUMBER(hlml_device_get_replaced_rows_pending_status, unsigned, 1)

int hlml_device_get_curr_pcie_link_width(device d, unsigned *width) { return 3; }
int hlml_device_get_pci_info(device d, pci_info *found) {
    strcpy(found->bus_id, d == FIRST ? "0000:b3:00.0" : "0000:19:00.0");
    return 0;
}
int hlml_device_get_temperature(device d, int sensor, unsigned *degrees) { *degrees = 50 + 10 * sensor; return 0; }
int hlml_device_get_clock_info(device d, int clock, unsigned *mhz) { *mhz = 1600; return clock ? 3 : 0; }
int hlml_device_get_memory_info(device d, memory *found) {
    found->total = 128ULL << 30;
    found->used = 5;
    return 0;
}
int hlml_device_get_total_ecc_errors(device d, int kind, int life, long long *count) {
    *count = 10 * kind + life;
    return 0;
}
int hlml_device_get_memory_error_counter(device d, int kind, int life, int place, long long *count) {
    *count = 100 * kind + 10 * life + place;
    return 0;
}
int hlml_device_get_replaced_rows(device d, int cause, unsigned *count, void *rows) { *count = cause + 3; return 0; }
int hlml_get_mac_addr_info(device d, uint64_t *ports, uint64_t *external) {
    ports[0] = 7;
    ports[1] = 1;
    return 0;
}
int hlml_nic_get_link(device d, uint32_t port, bool *up) { *up = port != 64; return 0; }
