/* The system calls of a plain C message bus: one wait, one receive, and one blocking send for each receiver of each packet,
 * with sbus's patterns compared one after the other. It is not the reference daemon; it does the same work per message
 * (specs/sbus.md, section 21) and stands in for it where that is not installed. Usage: relay PATH. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define CLIENTS_MAX 1024
#define PACKET_MAX 409600

struct client { int fd; size_t count, room; char **patterns; };
static struct client clients[CLIENTS_MAX];
static size_t client_count;
static char packet[PACKET_MAX + 1];

static int matches(const char *pattern, const char *key)
{
	const char *begin = pattern;
	if (!*pattern) return 1;
	for (;;) {
		if (!*key) return !*pattern;
		if (!*pattern) return pattern > begin && pattern[-1] == '/';
		if (*pattern == *key) { pattern++; key++; }
		else if (*pattern == '*') { pattern++; while (*key && *key != '/') key++; }
		else return 0;
	}
}

static void deliver(size_t size)
{
	for (size_t i = 0; i < client_count; i++)
		for (size_t j = 0; j < clients[i].count; j++)
			if (matches(clients[i].patterns[j], packet + 4)) {
				if (send(clients[i].fd, packet, size, MSG_NOSIGNAL) < 0) clients[i].count = 0;
				break;
			}
}

static void drop(int epoll, size_t i)
{
	epoll_ctl(epoll, EPOLL_CTL_DEL, clients[i].fd, NULL);
	close(clients[i].fd);
	memmove(clients + i, clients + i + 1, (--client_count - i) * sizeof(*clients));
}

int main(int argc, char **argv)
{
	struct sockaddr_un address = { .sun_family = AF_UNIX };
	struct epoll_event event = { .events = EPOLLIN };
	int listener = socket(AF_UNIX, SOCK_SEQPACKET, 0), epoll = epoll_create1(0);
	if (argc != 2) return 2;
	strncpy(address.sun_path, argv[1], sizeof(address.sun_path) - 1);
	if (bind(listener, (struct sockaddr *)&address, sizeof(address)) || listen(listener, 128)) return 1;
	event.data.fd = listener;
	epoll_ctl(epoll, EPOLL_CTL_ADD, listener, &event);
	for (;;) {
		struct epoll_event ready;
		if (epoll_wait(epoll, &ready, 1, -1) != 1) continue;
		if (ready.data.fd == listener) {
			int fd = accept(listener, NULL, NULL);
			if (fd < 0 || client_count == CLIENTS_MAX) return 1;
			clients[client_count++] = (struct client){ .fd = fd };
			event.data.fd = fd;
			epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event);
			continue;
		}
		size_t i = 0;
		while (i < client_count && clients[i].fd != ready.data.fd) i++;
		ssize_t size = recv(ready.data.fd, packet, PACKET_MAX, 0);
		if (size <= 0) { drop(epoll, i); continue; }
		packet[size] = 0;
		if (!strncmp(packet, "MSG ", 4)) deliver((size_t)size);
		else if (!strncmp(packet, "SUB ", 4)) {
			struct client *one = clients + i;
			if (one->count == one->room)
				one->patterns = realloc(one->patterns, (one->room = one->room * 2 + 8) * sizeof(char *));
			one->patterns[one->count++] = strdup(packet + 4);
		} else if (!strncmp(packet, "CMSG ", 5)) send(ready.data.fd, packet, (size_t)size, MSG_NOSIGNAL);
	}
}
