/* A network driver for tests, loaded with LD_PRELOAD: answers SIOCETHTOOL for interfaces whose name begins with "mlx",
 * as the kernel does with linux/ethtool.h, and writes each question into the file that ETHTOOL_STUB_LOG names.
 * ETHTOOL_STUB_EXTRA statistics stand before those that are wanted; the file ETHTOOL_STUB_GROWN adds as many once it
 * exists. ETHTOOL_STUB_MODULE names a file with the memory of the module. Everything else goes to the real kernel. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <linux/ethtool.h>
#include <linux/sockios.h>
#include <net/if.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static const char *NAMES[] = {"rx_pcs_symbol_err_phy", "rx_corrected_bits_phy", "rx_bits_phy", "rx_err_lane_0_phy",
    "rx_err_lane_3_phy", "rx_prio0_pause", "rx_prio3_pause", "rx_prio3_pause_duration", "tx_global_pause",
    "tx_pause_storm_error_events", "outbound_pci_stalled_wr", "outbound_pci_stalled_wr_events",
    "rx_pci_signal_integrity", "link_down_events_phy"};
enum { OURS = sizeof NAMES / sizeof *NAMES };

static unsigned statistics(void) {
    const char *extra = getenv("ETHTOOL_STUB_EXTRA"), *grown = getenv("ETHTOOL_STUB_GROWN");
    unsigned count = extra ? strtoul(extra, NULL, 10) : 0;
    if (grown && access(grown, F_OK) == 0)
        count *= 2;
    return count + OURS;
}

static long module(void *data, unsigned offset, unsigned length) {
    const char *path = getenv("ETHTOOL_STUB_MODULE");
    FILE *file = path ? fopen(path, "rb") : NULL;
    if (!file)
        return -EIO; /* as without a module in the cage */
    unsigned char memory[4096] = {0};
    long size = (long)fread(memory, 1, sizeof memory, file);
    fclose(file);
    if (data)
        memcpy(data, memory + offset, length);
    return size;
}

static int answer(unsigned command, void *data) {
    switch (command) {
    case ETHTOOL_GDRVINFO: {
        struct ethtool_drvinfo *info = data;
        strcpy(info->driver, "mlx5_core");
        strcpy(info->version, "24.10");
        strcpy(info->fw_version, "28.41.1000 (MT_0000000838)");
        return 0;
    }
    case ETHTOOL_GSSET_INFO: {
        struct ethtool_sset_info *info = data;
        info->sset_mask &= 1ULL << ETH_SS_STATS;
        info->data[0] = statistics();
        return 0;
    }
    case ETHTOOL_GSTRINGS: {
        struct ethtool_gstrings *strings = data;
        strings->len = statistics();
        for (unsigned i = 0; i < strings->len; i++) {
            unsigned first = strings->len - OURS;
            snprintf((char *)strings->data + i * ETH_GSTRING_LEN, ETH_GSTRING_LEN, "%s",
                     i < first ? "rx7_packets" : NAMES[i - first]);
        }
        return 0;
    }
    case ETHTOOL_GSTATS: {
        struct ethtool_stats *values = data;
        values->n_stats = statistics();
        for (unsigned i = 0; i < values->n_stats; i++) {
            unsigned first = values->n_stats - OURS;
            values->data[i] = i < first ? 0 : i - first + 1;
        }
        return 0;
    }
    case ETHTOOL_GFECPARAM:
        ((struct ethtool_fecparam *)data)->active_fec = ETHTOOL_FEC_RS;
        return 0;
    case ETHTOOL_GMODULEINFO: {
        struct ethtool_modinfo *info = data;
        long size = module(NULL, 0, 0);
        if (size < 0)
            return (int)size;
        info->type = ETH_MODULE_SFF_8636;
        info->eeprom_len = (unsigned)size;
        return 0;
    }
    case ETHTOOL_GMODULEEEPROM: {
        struct ethtool_eeprom *eeprom = data;
        long size = module(eeprom->data, eeprom->offset, eeprom->len);
        return size < 0 ? (int)size : 0;
    }
    }
    return -EOPNOTSUPP;
}

int ioctl(int fd, unsigned long request, ...) {
    va_list rest;
    va_start(rest, request);
    struct ifreq *asked = va_arg(rest, struct ifreq *);
    va_end(rest);
    if (request != SIOCETHTOOL || strncmp(asked->ifr_name, "mlx", 3) != 0) {
        int (*real)(int, unsigned long, ...) = (int (*)(int, unsigned long, ...))dlsym(RTLD_NEXT, "ioctl");
        return real(fd, request, asked);
    }
    unsigned command = *(unsigned *)asked->ifr_data;
    const char *log = getenv("ETHTOOL_STUB_LOG");
    FILE *file = log ? fopen(log, "a") : NULL;
    if (file) {
        fprintf(file, "%s %#x\n", asked->ifr_name, command);
        fclose(file);
    }
    int status = answer(command, asked->ifr_data);
    if (status == 0)
        return 0;
    errno = -status;
    return -1;
}

/* No netlink: what is asked for by it would reach the real kernel, which knows no interface of ours. */
int socket(int domain, int type, int protocol) {
    if (domain == AF_NETLINK) {
        errno = EAFNOSUPPORT;
        return -1;
    }
    int (*real)(int, int, int) = (int (*)(int, int, int))dlsym(RTLD_NEXT, "socket");
    return real(domain, type, protocol);
}
