/*
 * Processes of a user that map a file named libc.so.6, on a file system in user space whose server answers no read. Run as root in a mount
 * namespace of its own: silent_library DIRECTORY UID PROCESSES. Each says its pid.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/fuse.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <unistd.h>

enum { BYTES = 1 << 21, MEMORY = 16 << 20 };
static int device;

static void answer(uint64_t unique, int error, const void *data, size_t bytes)
{
	char out[256];
	struct fuse_out_header header = { .len = sizeof header + bytes, .error = -error, .unique = unique };

	memcpy(out, &header, sizeof header);
	memcpy(out + sizeof header, data, bytes);
	if (write(device, out, header.len) < 0)
		_exit(1);
}

static struct fuse_attr attributes(int is_root)
{
	return (struct fuse_attr){ .ino = is_root ? 1 : 2, .mode = is_root ? S_IFDIR | 0755 : S_IFREG | 0755, .nlink = 1,
				   .size = is_root ? 0 : BYTES, .blksize = 4096, .uid = getuid(), .gid = getgid() };
}

static void serve(void)
{
	static char in[1 << 16];
	struct fuse_in_header *header = (void *)in;

	while (read(device, in, sizeof in) > 0) {
		if (header->opcode == FUSE_INIT) {
			struct fuse_init_out out = { .major = 7, .minor = 31, .max_write = 4096 };
			answer(header->unique, 0, &out, sizeof out);
		} else if (header->opcode == FUSE_LOOKUP) {
			struct fuse_entry_out out = { .nodeid = 2, .entry_valid = 3600, .attr_valid = 3600, .attr = attributes(0) };
			answer(header->unique, 0, &out, sizeof out);
		} else if (header->opcode == FUSE_GETATTR) {
			struct fuse_attr_out out = { .attr_valid = 3600, .attr = attributes(header->nodeid == 1) };
			answer(header->unique, 0, &out, sizeof out);
		} else if (header->opcode == FUSE_OPEN) {
			struct fuse_open_out out = { .fh = 1 };
			answer(header->unique, 0, &out, sizeof out);
		} else if (header->opcode != FUSE_READ && header->opcode != FUSE_FORGET && header->opcode != FUSE_INTERRUPT) {
			answer(header->unique, ENOSYS, "", 0);
		}
	}
}

int main(int count, char **words)
{
	char options[100], path[300];

	if (count < 4)
		return 2;
	int user = atoi(words[2]), processes = atoi(words[3]);
	device = open("/dev/fuse", O_RDWR);
	snprintf(options, sizeof options, "fd=%d,rootmode=40000,user_id=%d,group_id=%d", device, user, user);
	if (mount("silent", words[1], "fuse", MS_NOSUID | MS_NODEV, options))
		return perror("mount"), 2;
	if (setresgid(user, user, user) || setresuid(user, user, user) || prctl(PR_SET_DUMPABLE, 1))
		return perror("setresuid"), 2;
	if (!fork()) {
		serve();
		_exit(0);
	}
	snprintf(path, sizeof path, "%s/libc.so.6", words[1]);
	int file = open(path, O_RDONLY);
	if (file < 0)
		return perror(path), 2;
	while (--processes > 0 && fork())
		;
	mmap(0, BYTES, PROT_READ, MAP_PRIVATE, file, 0);
	memset(mmap(0, MEMORY, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), 1, MEMORY);
	printf("%d\n", getpid());
	fflush(stdout);
	for (;;)
		pause();
}
