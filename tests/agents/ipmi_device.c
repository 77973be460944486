/* Preloaded into a process under test: its /dev/ipmi0 becomes a socket to a BMC of ours.
 *
 * IPMI_STUB_PATH is the file that is played, IPMI_STUB_SOCKET the socket (SOCK_SEQPACKET) that answers. The ioctls take
 * and give the kernel's own structures, so what the process packs is read here as the kernel would read it. poll works
 * on the socket as it does on the device. The other end gets and gives packets of struct packet.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/ipmi.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

struct packet {
	long msgid;
	unsigned char recv_type, netfn, cmd, lun;
	unsigned char data[IPMI_MAX_MSG_LENGTH + 64];
} __attribute__((packed));

#define HEAD (sizeof(long) + 4)

static int played = -1;

static int play(void)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	const char *refusal = getenv("IPMI_STUB_ERRNO");

	if (refusal) {
		errno = atoi(refusal);
		return -1;
	}
	strncpy(address.sun_path, getenv("IPMI_STUB_SOCKET"), sizeof(address.sun_path) - 1);
	played = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	if (connect(played, (struct sockaddr *)&address, sizeof(address)) != 0)
		abort();
	return played;
}

static int opened(const char *name, const char *path, int flags, mode_t mode)
{
	const char *wanted = getenv("IPMI_STUB_PATH");
	int (*real)(const char *, int, ...) = dlsym(RTLD_NEXT, name);

	if (wanted && strcmp(path, wanted) == 0)
		return play();
	return real(path, flags, mode);
}

int open(const char *path, int flags, ...)
{
	va_list rest;
	va_start(rest, flags);
	mode_t mode = va_arg(rest, mode_t);
	va_end(rest);
	return opened("open", path, flags, mode);
}

int open64(const char *path, int flags, ...)
{
	va_list rest;
	va_start(rest, flags);
	mode_t mode = va_arg(rest, mode_t);
	va_end(rest);
	return opened("open64", path, flags, mode);
}

static int sends(const struct ipmi_req *request)
{
	const struct ipmi_system_interface_addr *address = (const void *)request->addr;
	struct packet packet = {.msgid = request->msgid, .netfn = request->msg.netfn, .cmd = request->msg.cmd};

	if (request->addr_len < sizeof(*address) || address->addr_type != IPMI_SYSTEM_INTERFACE_ADDR_TYPE ||
	    address->channel != IPMI_BMC_CHANNEL) {
		errno = EINVAL;
		return -1;
	}
	if (request->msg.data_len > IPMI_MAX_MSG_LENGTH) {
		errno = EMSGSIZE;
		return -1;
	}
	packet.lun = address->lun;
	memcpy(packet.data, request->msg.data, request->msg.data_len);
	return send(played, &packet, HEAD + request->msg.data_len, 0) < 0 ? -1 : 0;
}

static int receives(struct ipmi_recv *received)
{
	struct packet packet;
	ssize_t size = recv(played, &packet, sizeof(packet), MSG_DONTWAIT);
	int cut = 0;

	if (size < (ssize_t)HEAD) {
		errno = size == 0 ? ENODEV : EAGAIN;
		return -1;
	}
	if (received->addr_len < sizeof(struct ipmi_system_interface_addr)) {
		errno = EINVAL;
		return -1;
	}
	size -= HEAD;
	if (size > received->msg.data_len) {
		size = received->msg.data_len;
		cut = 1;
	}
	struct ipmi_system_interface_addr from = {IPMI_SYSTEM_INTERFACE_ADDR_TYPE, IPMI_BMC_CHANNEL, packet.lun};
	memcpy(received->addr, &from, sizeof(from));
	received->addr_len = sizeof(from);
	received->recv_type = packet.recv_type;
	received->msgid = packet.msgid;
	received->msg.netfn = packet.netfn;
	received->msg.cmd = packet.cmd;
	received->msg.data_len = size;
	memcpy(received->msg.data, packet.data, size);
	if (cut)
		errno = EMSGSIZE;
	return cut ? -1 : 0;
}

int ioctl(int handle, unsigned long number, ...)
{
	int (*real)(int, unsigned long, ...) = dlsym(RTLD_NEXT, "ioctl");
	va_list rest;
	va_start(rest, number);
	void *argument = va_arg(rest, void *);
	va_end(rest);
	if (played < 0 || handle != played)
		return real(handle, number, argument);
	if (number == (unsigned int)IPMICTL_SEND_COMMAND)
		return sends(argument);
	if (number == (unsigned int)IPMICTL_RECEIVE_MSG_TRUNC)
		return receives(argument);
	return real(handle, number, argument);
}
