/* SPDX-License-Identifier: MIT */
/*
 * For k = 1, 2, 3 ... the k-th call of saving a step into a folder of checkpoints, replacing one,
 * removing old ones and sweeping fails, with ENOSPC or EIO, once or from then on, until no call is
 * left. Whatever failed said so in words; every step that has a manifest is whole; what a commit
 * promised is there; and the folder can be used as if nothing had been. No descriptor leaks.
 *
 * Each run is a process of its own, so that a hang or a crash is one bad k that names itself.
 */
#include <sys/wait.h>
#include "../conform/steps.h"
#include "sys/fault.h"

#define CALLS_MAX 4096

static struct {
	atomic_uint calls;
	unsigned int k;
	bool for_good;
	int code;
} fault;

static int hook(const char *name)
{
	unsigned int call = ++fault.calls;

	(void)name;
	return call == fault.k || (fault.for_good && call > fault.k) ? fault.code : 0;
}

/* 0, or an error that must have words. */
static int told(int rc)
{
	CHECK(rc <= 0);
	CHECK(!rc || (kit_err.code == rc && kit_err.message[0] && kit_err.operation[0]));
	return rc;
}

/* All that a writer does, as far as it comes; true if every call went well. */
static bool work(const char *path, bool *saved, bool *replaced)
{
	struct pen_checkpoint_removal *removal;
	struct pen_checkpoints *writer;
	bool clean;

	if (told(pen_checkpoints_open(path, PEN_WRITE, 0, &writer, &kit_err)))
		return false;
	clean = !told(pen_checkpoints_sweep(writer, 0, &removal, &kit_err));
	pen_checkpoint_removal_free(removal);
	*saved = !told(step_save(writer, 3, 0, 3, &kit_err));
	*replaced = !told(step_save(writer, 2, PEN_CHECKPOINT_OVERWRITE, 8, &kit_err));
	clean &= !told(pen_checkpoints_gc(writer, 2, 0, &removal, &kit_err));
	pen_checkpoint_removal_free(removal);
	pen_checkpoints_close(writer);
	return clean && *saved && *replaced;
}

static void prepare(const char *path)
{
	struct pen_checkpoints *writer = steps_open(path, PEN_WRITE, 0);
	const char *file;

	OK(step_save(writer, 1, 0, 1, &kit_err));
	OK(step_save(writer, 2, 0, 2, &kit_err));
	pen_checkpoints_close(writer);
	/* What a crash left, beside it. */
	file = in_scratch("f/step-00000009");
	CHECK(!mkdir(file, 0777));
	kit_write(in_scratch("f/step-00000009/rank-00000.pt"), 0, 10, 7);
	kit_write(in_scratch("f/step-00000002/rank-00000.1.pt"), 0, 10, 7);
}

static void look_after(const char *path, bool saved, bool replaced)
{
	struct pen_checkpoints *writer = steps_open(path, PEN_WRITE, 0);
	struct pen_checkpoint_removal *removal;
	struct pen_checkpoint *two;

	CHECK(!strstr(steps_told(writer), "damaged"));
	CHECK(!saved || strstr(steps_told(writer), "whole 3"));
	OK(pen_checkpoints_show(writer, 2, &two, &kit_err));
	CHECK(!replaced || strcmp(two->files[0].name, "rank-00000.pt"));
	pen_checkpoint_free(two);
	OK(pen_checkpoints_verify(writer, 2, NULL, NULL, &kit_err));
	OK(pen_checkpoints_sweep(writer, 0, &removal, &kit_err));
	CHECK_EQ(removal->left_count, 0);
	pen_checkpoint_removal_free(removal);
	CHECK(!strstr(steps_told(writer), "unfinished"));
	CHECK_EQ(entries_in(in_scratch("f/step-00000002")), 2);
	pen_checkpoints_close(writer);
	if (saved)
		return;
}

static unsigned int descriptors(void)
{
	return entries_in("/proc/self/fd");
}

/* One process. Its status: 0, the k-th call was made and failed, and all was well after that; 2, it
 * was not reached. */
static void run(void)
{
	const char *path = in_scratch("f");
	bool saved = false, replaced = false, reached, clean;
	unsigned int before;
	char kept[600];

	snprintf(kept, sizeof(kept), "%s", path);
	prepare(kept);
	before = descriptors();
	sys_fault_hook = hook;
	clean = work(kept, &saved, &replaced);
	sys_fault_hook = NULL;
	reached = fault.calls >= fault.k;
	CHECK(reached || clean);
	CHECK_EQ(descriptors(), before);
	look_after(kept, saved, replaced);
	scratch_remove();
	_exit(reached ? 0 : 2);
}

static void fail_each(int code, bool for_good)
{
	unsigned int stride = TEST_SLOW_BUILD ? 9 : 2;
	int status = 0;

	fault.code = code;
	fault.for_good = for_good;
	/* With an offset, so that the two cases do not skip the same calls. */
	for (fault.k = 1 + for_good; fault.k < CALLS_MAX && !status; fault.k += stride) {
		pid_t child = fork();

		if (!child) {
			alarm(30);
			run();
		}
		CHECK(waitpid(child, &status, 0) == child);
		if (status && (!WIFEXITED(status) || WEXITSTATUS(status) != 2)) {
			fprintf(stderr, "with call %u failing: status %d\n", fault.k, status);
			exit(1);
		}
	}
	printf("%u calls\n", fault.k);
	CHECK(status && fault.k > 300);
}

TEST_SLOW(a_full_disk_at_each_call)
{
	fail_each(ENOSPC, true);
}

TEST_SLOW(an_error_of_the_disk_at_each_call)
{
	fail_each(EIO, false);
}

TEST_MAIN
