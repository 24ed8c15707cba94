/* Communicators: made around a root's loopback port, as HCCL's are around a root's NIC. */
#define _GNU_SOURCE
#include "hccl.h"
#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static const char MAGIC[8] = "FAKHCCL";

typedef struct {
    char magic[8];
    int port, pid;
} root_info;

typedef struct {
    int rank, port, device;
} introduction; /* what a rank tells the root */

typedef struct {
    HcclResult verdict;
    int ports[MAX_RANKS];
} directory; /* what the root answers */

typedef struct {
    int port, listener;
} root;

static root roots[64]; /* of this process, until their communicator is made */
static pthread_mutex_t creating = PTHREAD_MUTEX_INITIALIZER, calling = PTHREAD_MUTEX_INITIALIZER;

/* FAKE_CANN_ISSUE_US makes a call long enough for another thread to meet it. */
bool hccl_enter(void) {
    if (pthread_mutex_trylock(&calling)) return false;
    usleep((useconds_t)fake_cann_setting("FAKE_CANN_ISSUE_US", 0));
    return true;
}

void hccl_leave(void) { pthread_mutex_unlock(&calling); }

static int timeout_ms(void) { return (int)fake_cann_setting("FAKE_CANN_CONNECT_TIMEOUT_MS", 10000); }

static int listen_on(int *port) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (bind(listener, (void *)&address, size) || listen(listener, 64)) abort();
    getsockname(listener, (void *)&address, &size);
    *port = ntohs(address.sin_port);
    return listener;
}

static void limit_waits(int connection) {
    long ms = fake_cann_setting("FAKE_CANN_EXEC_TIMEOUT_MS", 60000);
    struct timeval limit = {ms / 1000, ms % 1000 * 1000};
    setsockopt(connection, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    setsockopt(connection, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
}

static int connect_to(int port) {
    struct sockaddr_in address = {
        .sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int connection = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (connect(connection, (void *)&address, sizeof address)) {
        close(connection);
        return -1;
    }
    limit_waits(connection);
    return connection;
}

static int accept_from(int listener) {
    struct pollfd waiting = {.fd = listener, .events = POLLIN};
    if (poll(&waiting, 1, timeout_ms()) != 1) return -1;
    int connection = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    if (connection >= 0) limit_waits(connection);
    return connection;
}

HcclResult put(int peer, const void *bytes, size_t size) {
    for (const char *at = bytes; size;) {
        ssize_t sent = send(peer, at, size, MSG_NOSIGNAL);
        if (sent <= 0) return sent < 0 && errno == EAGAIN ? HCCL_TIMEOUT : HCCL_TRANSFER;
        at += sent;
        size -= (size_t)sent;
    }
    return OK;
}

HcclResult get(int peer, void *bytes, size_t size) {
    for (char *at = bytes; size;) {
        ssize_t received = recv(peer, at, size, 0);
        if (received <= 0) return received < 0 && errno == EAGAIN ? HCCL_TIMEOUT : HCCL_TRANSFER;
        at += received;
        size -= (size_t)received;
    }
    return OK;
}

static int take_root(int port) {
    for (int i = 0; i < 64; i++)
        if (roots[i].listener && roots[i].port == port) {
            int listener = roots[i].listener;
            roots[i] = (root){0};
            return listener;
        }
    return -1;
}

/* The root: meets every rank, refuses two on one device, tells everybody where the others listen. */
static HcclResult gather(communicator *c, int listener, directory *all) {
    bool used[MAX_DEVICES] = {false};
    used[c->device] = true;
    for (int i = 1; i < c->size; i++) {
        introduction who;
        int connection = accept_from(listener);
        if (connection < 0) return HCCL_TIMEOUT;
        if (get(connection, &who, sizeof who)) return HCCL_TRANSFER;
        if (who.rank <= 0 || who.rank >= c->size || c->peers[who.rank] >= 0) return HCCL_PARAMETER;
        c->peers[who.rank] = connection;
        all->ports[who.rank] = who.port;
        if (used[who.device]) all->verdict = HCCL_PARAMETER;
        used[who.device] = true;
    }
    for (int i = 1; i < c->size; i++)
        if (put(c->peers[i], all, sizeof *all)) return HCCL_TRANSFER;
    return all->verdict;
}

/* Everybody else: meets the root, then connects to the lower ranks and is met by the higher ones. */
static HcclResult attend(communicator *c, const root_info *info, int listener, introduction me) {
    directory all;
    if ((c->peers[0] = connect_to(info->port)) < 0) return HCCL_CONNECT;
    if (put(c->peers[0], &me, sizeof me) || get(c->peers[0], &all, sizeof all)) return HCCL_TRANSFER;
    if (all.verdict) return all.verdict;
    for (int i = 1; i < c->rank; i++) {
        if ((c->peers[i] = connect_to(all.ports[i])) < 0) return HCCL_CONNECT;
        if (put(c->peers[i], &c->rank, sizeof c->rank)) return HCCL_TRANSFER;
    }
    for (int i = c->rank + 1; i < c->size; i++) {
        int rank, connection = accept_from(listener);
        if (connection < 0) return HCCL_TIMEOUT;
        if (get(connection, &rank, sizeof rank)) return HCCL_TRANSFER;
        c->peers[rank] = connection;
    }
    return OK;
}

static void disconnect(communicator *c) {
    for (int i = 0; i < c->size; i++)
        if (c->peers[i] >= 0) close(c->peers[i]);
}

static HcclResult assemble(communicator *c, const root_info *info) {
    introduction me = {.rank = c->rank, .device = c->device};
    int listener = c->rank ? listen_on(&me.port) : take_root(info->port);
    if (listener < 0) return HCCL_PARAMETER;
    directory all = {0};
    HcclResult error = c->rank ? attend(c, info, listener, me) : gather(c, listener, &all);
    close(listener);
    return error;
}

HcclResult HcclGetRootInfo(void *out) {
    ENTER();
    if (current_device() < 0) return HCCL_PARAMETER;
    if (!hccl_enter()) return HCCL_INTERNAL;
    root_info info = {.pid = getpid()};
    memcpy(info.magic, MAGIC, sizeof MAGIC);
    int slot = 0;
    while (slot < 64 && roots[slot].listener) slot++;
    if (slot < 64) {
        roots[slot].listener = listen_on(&info.port);
        roots[slot].port = info.port;
    }
    hccl_leave();
    memset(out, 0, ROOT_INFO_BYTES);
    memcpy(out, &info, sizeof info);
    return slot < 64 ? OK : HCCL_INTERNAL;
}

/* Communicators of a device are to be made one after the other: a second one meanwhile is refused. */
HcclResult HcclCommInitRootInfo(uint32_t size, const void *root_bytes, uint32_t rank, communicator **out) {
    ENTER();
    const root_info *info = root_bytes;
    if (memcmp(info->magic, MAGIC, sizeof MAGIC) || size > MAX_RANKS || rank >= size || current_device() < 0)
        return HCCL_PARAMETER;
    if (pthread_mutex_trylock(&creating)) return HCCL_INTERNAL;
    usleep((useconds_t)fake_cann_setting("FAKE_CANN_ISSUE_US", 0));
    communicator *c = calloc(1, sizeof *c);
    *c = (communicator){.size = (int)size, .rank = (int)rank, .device = physical_device(current_device())};
    memset(c->peers, -1, sizeof c->peers);
    snprintf(c->name, NAME_BYTES, "fake_%d_%d", info->pid, info->port);
    HcclResult error = assemble(c, info);
    if (error) {
        disconnect(c);
        free(c);
    } else
        *out = c;
    pthread_mutex_unlock(&creating);
    return error;
}

HcclResult HcclCommInitRootInfoConfig(uint32_t size, const void *root, uint32_t rank, const void *config, communicator **out) {
    return HcclCommInitRootInfo(size, root, rank, out);
}

/* What still waits for a peer fails; the struct stays, because tasks on streams name it. */
HcclResult HcclCommDestroy(communicator *c) {
    ENTER();
    if (c->destroyed) return HCCL_PARAMETER;
    if (!hccl_enter()) return HCCL_INTERNAL;
    hccl_leave();
    c->destroyed = true;
    for (int i = 0; i < c->size; i++)
        if (c->peers[i] >= 0) shutdown(c->peers[i], SHUT_RDWR);
    disconnect(c);
    return OK;
}

HcclResult HcclGetCommAsyncError(communicator *c, HcclResult *error) {
    ENTER();
    *error = c->async_error;
    return OK;
}

HcclResult HcclGetCommName(communicator *c, char *name) {
    strcpy(name, c->name);
    return OK;
}

HcclResult HcclGetRankSize(communicator *c, uint32_t *size) {
    *size = (uint32_t)c->size;
    return OK;
}

HcclResult HcclGetRankId(communicator *c, uint32_t *rank) {
    *rank = (uint32_t)c->rank;
    return OK;
}

uint32_t HcclGetCommConfigCapability(void) { return 4; }

const char *HcclGetErrorString(HcclResult code) {
    switch (code) {
        case OK: return "no error";
        case HCCL_PARAMETER: return "parameter error";
        case HCCL_INTERNAL: return "internal error";
        case HCCL_NOT_SUPPORTED: return "feature not supported";
        case HCCL_TIMEOUT: return "timeout";
        case HCCL_CONNECT: return "tcp connect failed";
        case HCCL_TRANSFER: return "tcp transfer failed";
        default: return "unknown error";
    }
}
