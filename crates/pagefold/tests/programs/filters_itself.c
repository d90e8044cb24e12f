/* Once its pages are folded, it gives itself a filter of system calls, checks what it and a child of its own find in pages that
 * they discard by bare system calls, and in all others. Arguments: `all` or `one`, the threads that the filter is for; what
 * becomes of `ioctl`, `poll` and `ppoll`: `allow`, `thread` (is killed), `process` (is killed) or `errno`. With `refused` it has no right
 * to a filter. It ends with its input. */
#include "pages.h"
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>

enum { PAGES = 2048, DISCARDED = 100 };

static long bare(long number, long a, long b, long c)
{
	long answer;

	__asm__ volatile("syscall" : "=a"(answer) : "a"(number), "D"(a), "S"(b), "d"(c) : "rcx", "r11", "memory");
	return answer;
}

static void hangs(int signal)
{
	bare(SYS_write, 2, (long)"a discard hangs\n", 16);
	bare(SYS_exit_group, 2, signal, 0);
}

/* Number of pages that are not as they must be, once some of them are discarded from this one on. */
static int wrong_once_discarded(char *area, size_t first)
{
	int wrong = 0;

	for (size_t n = first; n < first + DISCARDED; n++) {
		bare(SYS_madvise, (long)area + n * PAGE_BYTES, PAGE_BYTES, MADV_DONTNEED);
		wrong += *(volatile uint64_t *)(area + n * PAGE_BYTES) != 0;
	}
	for (size_t n = first + DISCARDED; n < PAGES; n++)
		wrong += !holds(area + n * PAGE_BYTES, content_of(n));
	return wrong > 255 ? 255 : wrong;
}

/* The right by which root needs no `no_new_privs`. */
static void give_up_rights(void)
{
	struct __user_cap_header_struct header = { _LINUX_CAPABILITY_VERSION_3, 0 };
	struct __user_cap_data_struct none[2] = { { 0 } };

	if (syscall(SYS_capset, &header, none))
		fail("capset");
}

static void filter_calls(int all_threads, unsigned answer, int is_refused)
{
	long set;
	struct sock_filter code[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_ioctl, 3, 0),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_poll, 2, 0),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_ppoll, 1, 0),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
		BPF_STMT(BPF_RET | BPF_K, answer),
	};
	struct sock_fprog filter = { sizeof code / sizeof *code, code };

	if (is_refused)
		give_up_rights();
	else if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
		fail("no_new_privs");
	set = all_threads ? syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &filter)
			: prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter, 0, 0);
	if (is_refused ? set != -1 || errno != EACCES : set)
		fail("seccomp");
}

int main(int count, char **words)
{
	char *area = filled_area(PAGES), request;
	const char *action = count > 2 ? words[2] : "";
	int is_refused = !strcmp(action, "refused");
	unsigned answer = !strcmp(action, "errno") ? SECCOMP_RET_ERRNO | 1
			: !strcmp(action, "thread") ? SECCOMP_RET_KILL_THREAD
			: is_refused || !strcmp(action, "process") ? SECCOMP_RET_KILL_PROCESS : SECCOMP_RET_ALLOW;
	int of_child, own;

	setvbuf(stdout, 0, _IONBF, 0); /* it would ask for its kind by ioctl */
	wait_until_folded(area, PAGES);
	signal(SIGALRM, hangs);
	alarm(90);
	filter_calls(!strcmp(words[1], "all"), answer, is_refused);
	usleep(1500000); /* the agent's threads make their next calls */
	own = wrong_once_discarded(area, 0);
	pid_t child = fork();
	if (!child)
		_exit(wrong_once_discarded(area, DISCARDED));
	if (waitpid(child, &of_child, 0) != child || !WIFEXITED(of_child))
		fail("its child was killed");
	alarm(0);
	printf("wrong pages: %d of its own, %d of its child\n", own, WEXITSTATUS(of_child));
	while (read(0, &request, 1) == 1)
		;
	return own || of_child;
}
