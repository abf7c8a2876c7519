/*
 * Has QEMU 11.1.3 of Debian migrate vhost-user-test-device, which it refuses by itself. Loaded by LD_PRELOAD, before
 * QEMU begins.
 *
 * QEMU has two reasons: the device says that it cannot be migrated, and so does every device with shared memory
 * regions. Here the device gets the description of vhost-user-fs, and a field behind it that carries the daemon's state
 * by QEMU's own functions. The places of these structures are those of one build. It ends at once in another.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
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

static int get(void *file, void *device, size_t len, const void *field)
{
    int (*load)(void *, void *, void **) = find("vhost_load_backend_state");
    void *error = NULL;

    return load(vhost_of(device), file, &error);
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
