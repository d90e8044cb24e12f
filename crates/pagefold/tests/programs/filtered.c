/* Has pages that can be folded, and lets itself make only the system calls whose numbers it is given, and a few of its own: for
 * any other, it is killed. Each byte of its input is a request: `w` writes some pages, `f` adds a filter that allows all, any other
 * checks all. The answer to each
 * is a line, `good` or `bad`. */
#include "pages.h"
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

enum { PAGES = 2048, WRITTEN = 7, MOST = 200 };

static unsigned written;

static unsigned content_now(size_t n)
{
	return n % WRITTEN ? content_of(n) : 5000 * written + content_of(n);
}

static void filter_calls(int count, char **numbers)
{
	static struct sock_filter filter[2 * MOST];
	struct sock_fprog program = { 0, filter };
	int own[] = { SYS_read, SYS_write, SYS_exit_group };
	int allowed[MOST], n = 0;

	if (count > MOST - 10)
		fail("too many numbers");
	while (n < 3)
		allowed[n] = own[n], n++;
	while (count--)
		allowed[n++] = atoi(*numbers++);
	filter[program.len++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
	while (n--) {
		filter[program.len++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, allowed[n], 0, 1);
		filter[program.len++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
	}
	filter[program.len++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS);
	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program))
		fail("seccomp");
}

static void filter_more(void)
{
	static struct sock_filter allow = BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
	struct sock_fprog program = { 1, &allow };

	if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program))
		fail("seccomp");
}

int main(int count, char **numbers)
{
	char *area = filled_area(PAGES), request;

	filter_calls(count - 1, numbers + 1);
	while (read(0, &request, 1) == 1) {
		size_t wrong = 0;

		if (request == 'w') {
			written++;
			for (size_t n = 0; n < PAGES; n += WRITTEN)
				fill(area + n * PAGE_BYTES, content_now(n));
		}
		if (request == 'f')
			filter_more();
		for (size_t n = 0; n < PAGES; n++)
			wrong += !holds(area + n * PAGE_BYTES, content_now(n));
		if (write(1, wrong ? "bad\n" : "good\n", wrong ? 4 : 5) < 0)
			return 1;
	}
	return 0;
}
