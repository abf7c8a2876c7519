/*
 * Has QEMU 11.1.3 of Debian migrate vhost-user-test-device, which it refuses by itself. Loaded by LD_PRELOAD, before
 * QEMU begins.
 *
 * QEMU has two reasons: the device says that it cannot be migrated, and so does every device with shared memory
 * regions. Here the device gets the description of vhost-user-fs, and a field behind it that carries the daemon's state.
 * While the target waits for the daemon to load it, it maps what the daemon asks for. The places of these structures are
 * those of one build. It ends at once in another.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

/* Where that build has them, and how long they are */
enum {
    INFO = 0x1c46540, /* virtio_vmstate_info */
    TEST_DEVICE = 0x1c47fc0, /* the description of vhost-user-test-device */
    FS_DEVICE = 0x1c49400, /* that of vhost-user-fs */
    DESCRIPTION_LEN = 112,
    FIELDS = 96, /* in a description */
    PARTS = 104,
    FIELD_LEN = 96,
    FIELD_INFO = 56, /* in a field */
    INFO_LEN = 40,
    INFO_GET = 8, /* in an info */
    INFO_PUT = 16,
    DEVICE_LEN = 0x538,
    OPERATIONS = 0x210, /* in a vhost_dev */
    CONNECTION = 0x218,
};

static char info[INFO_LEN], fields[3 * FIELD_LEN];

static void end(const char *why)
{
    fprintf(stderr, "qemu-migrates: %s\n", why);
    _exit(77);
}

static void *find(const char *name)
{
    void *found = dlsym(RTLD_DEFAULT, name);

    if (!found)
        end(name);
    return found;
}

/* The device's vhost_dev: it has the operations of vhost-user */
static char *vhost_of(char *device)
{
    void *operations = find("user_ops");
    char *at;

    for (at = device; at < device + DEVICE_LEN - OPERATIONS; at += sizeof(void *))
        if (*(void **)(at + OPERATIONS) == operations)
            return at;
    end("no vhost_dev");
    return NULL;
}

/* The connection to the daemon: its other end has a path of the case */
static int daemon_socket(void)
{
    struct sockaddr_un peer;
    socklen_t len;
    int fd;

    for (fd = 3; fd < 1024; fd++) {
        len = sizeof(peer);
        memset(&peer, 0, sizeof(peer));
        if (!getpeername(fd, (struct sockaddr *)&peer, &len) && peer.sun_family == AF_UNIX &&
            strstr(peer.sun_path, "/sockets/s@"))
            return fd;
    }
    end("no connection to the daemon");
    return -1;
}

/* The beginnings of GLib's public structures GSource and GSourceCallbackFuncs */
struct callbacks {
    void (*ref)(void *), (*unref)(void *);
    void (*get)(void *data, void *source, void **function, void **argument);
};

struct source {
    void *data;
    const struct callbacks *callbacks;
};

/* A context of events in which QEMU serves the daemon's requests, and nothing else */
static void *requests_of(char *vhost)
{
    void *(*create)(void) = find("g_main_context_new"), *(*watch)(void *, int) = find("qio_channel_create_watch");
    void (*set)(void *, void *, void *, void *) = find("g_source_set_callback");
    unsigned (*attach)(void *, void *) = find("g_source_attach");
    /* The connection's dev, user, channel for the daemon's requests, and source of its events */
    void **connection = *(void ***)(vhost + CONNECTION), *context = create(), *mine, *function, *argument;
    struct source *source = connection[3];

    source->callbacks->get(source->data, source, &function, &argument);
    mine = watch(connection[2], 1);
    set(mine, function, argument, NULL);
    attach(mine, context);
    return context;
}

/* VHOST_USER_CHECK_DEVICE_STATE. Meanwhile QEMU serves the daemon's requests: it maps what the guest has mapped */
static int check(char *vhost)
{
    int (*iterate)(void *, int) = find("g_main_context_iteration");
    void (*drop)(void *) = find("g_main_context_unref"), *context = requests_of(vhost);
    uint32_t request[3] = { 43, 1, 0 };
    struct pollfd reply = { .fd = daemon_socket(), .events = POLLIN };
    struct {
        uint32_t head[3];
        uint64_t result;
    } __attribute__((packed)) answer;

    if (write(reply.fd, request, sizeof(request)) != sizeof(request))
        return -1;
    /* 5 ms: requests wait no longer for the next turn */
    while (!poll(&reply, 1, 5))
        while (iterate(context, 0))
            ;
    drop(context);
    if (recv(reply.fd, &answer, sizeof(answer), MSG_WAITALL) != sizeof(answer) || answer.head[0] != 43)
        return -1;
    return answer.result ? -1 : 0;
}

struct turn {
    char *vhost;
    void *coroutine;
    /* Where the daemon reads the state */
    int pipe;
    int done;
};

static void check_in_turn(void *argument)
{
    void (*wake)(void *) = find("aio_co_wake");
    struct turn *turn = argument;

    /* The daemon asks for nothing before it has all: QEMU would find a request here, and wait for it after this turn */
    close(turn->pipe);
    turn->done = check(turn->vhost);
    wake(turn->coroutine);
}

/* QEMU loads a session in a coroutine, and cannot add memory there. So this is done by the main loop */
static int check_outside(char *vhost, int pipe)
{
    void *(*self)(void) = find("qemu_coroutine_self"), *(*context)(void) = find("qemu_get_aio_context");
    void (*schedule)(void *, void *, void *, const char *) = find("aio_bh_schedule_oneshot_full");
    void (*yield)(void) = find("qemu_coroutine_yield");
    struct turn turn = { .vhost = vhost, .coroutine = self(), .pipe = pipe, .done = -1 };

    schedule(context(), check_in_turn, &turn, "qemu-migrates");
    yield();
    return turn.done;
}

/* What vhost_save_backend_state() has written: parts, each after its length, and a part without length */
static int get(void *file, void *device, size_t len, const void *field)
{
    int (*set)(void *, int, int, int, int *, void **) = find("vhost_set_device_state_fd");
    uint32_t (*get_be32)(void *) = find("qemu_get_be32");
    size_t (*get_buffer)(void *, void *, size_t) = find("qemu_get_buffer");
    char *vhost = vhost_of(device), *part;
    int ends[2], reply = -1, done = -1;
    void *error = NULL;
    uint32_t size;

    if (pipe(ends))
        return -1;
    /* QEMU itself refuses what a device that is not started asks for, by a null pointer */
    *(void **)vhost = device;
    /* To load, while stopped */
    if (set(vhost, 1, 0, ends[0], &reply, &error) || reply != -1) {
        *(void **)vhost = NULL;
        return -1;
    }
    close(ends[0]);
    while ((size = get_be32(file))) {
        part = malloc(size);
        if (get_buffer(file, part, size) != size || write(ends[1], part, size) != size)
            end("the state cannot be passed on");
        free(part);
    }
    done = check_outside(vhost, ends[1]);
    *(void **)vhost = NULL;
    return done;
}

static int put(void *file, void *device, size_t len, const void *field, void *json)
{
    int (*save)(void *, void *, void **) = find("vhost_save_backend_state");
    void *error = NULL;

    return save(vhost_of(device), file, &error);
}

static void write_to(void *at, const void *bytes, size_t len, int after)
{
    uintptr_t page = sysconf(_SC_PAGESIZE), from = (uintptr_t)at & -page;
    size_t all = ((uintptr_t)at + len - from + page - 1) & -page;

    if (mprotect((void *)from, all, PROT_READ | PROT_WRITE | (after & PROT_EXEC)))
        end("mprotect");
    memcpy(at, bytes, len);
    mprotect((void *)from, all, after);
}

__attribute__((constructor)) static void begin(void)
{
    static const char *const blockers[] = { "migrate_add_blocker", "migrate_add_blocker_modes", "migrate_del_blocker" };
    /* xor eax, eax; ret */
    static const unsigned char nothing[] = { 0x31, 0xc0, 0xc3 };
    char *own = dlsym(RTLD_DEFAULT, "virtio_vmstate_info"), *test, *fs, *first, description[DESCRIPTION_LEN];
    void *to;
    size_t i;

    /* The shell that starts QEMU, for example */
    if (!own)
        return;
    test = own - INFO + TEST_DEVICE;
    fs = own - INFO + FS_DEVICE;
    if ((uintptr_t)(own - INFO) & 0xfff || strcmp(*(char **)test, "vhost-user-test-device") ||
        strcmp(*(char **)fs, "vhost-user-fs"))
        end("not the QEMU that this is for");

    memcpy(info, own, INFO_LEN);
    to = get;
    memcpy(info + INFO_GET, &to, sizeof(to));
    to = put;
    memcpy(info + INFO_PUT, &to, sizeof(to));
    /* The device, the daemon's state, the end */
    first = *(char **)(fs + FIELDS);
    memcpy(fields, first, FIELD_LEN);
    memcpy(fields + FIELD_LEN, first, FIELD_LEN);
    to = info;
    memcpy(fields + FIELD_LEN + FIELD_INFO, &to, sizeof(to));
    memcpy(fields + 2 * FIELD_LEN, first + FIELD_LEN, FIELD_LEN);

    memcpy(description, fs, DESCRIPTION_LEN);
    memcpy(description, test, sizeof(to));
    to = fields;
    memcpy(description + FIELDS, &to, sizeof(to));
    memset(description + PARTS, 0, sizeof(to));
    write_to(test, description, DESCRIPTION_LEN, PROT_READ);
    for (i = 0; i < sizeof(blockers) / sizeof(*blockers); i++)
        write_to(find(blockers[i]), nothing, sizeof(nothing), PROT_READ | PROT_EXEC);
}
