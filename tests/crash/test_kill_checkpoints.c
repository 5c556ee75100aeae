/* SPDX-License-Identifier: MIT */
/*
 * A process that saves steps, replaces some, abandons some and removes old ones is killed (SIGKILL)
 * before every call that changes something, and at random moments. Afterwards the lock is free,
 * every step that has a manifest is whole, the last one that was committed is there and verifies,
 * and after a sweep nothing else is left.
 */
#include <sys/wait.h>
#include <time.h>
#include "../conform/steps.h"
#include "sys/fault.h"

#define CALLS_MAX 4096

static struct shared {
	atomic_uint calls;
	_Atomic uint64_t committed;	/* the last step whose commit has returned */
} *shared;
static unsigned int kill_at;		/* 0: never */
static char folder[600];

/* Before each call that changes something: between two of these all moments are alike. */
static int hook(const char *name)
{
	static const char *const changes[] = {
		"mkdir", "rmdir", "unlink", "linkat", "rename", "pwrite", "fsync", "O_TMPFILE",
		"ftruncate", "flock",
	};

	for (size_t i = 0; i < COUNT(changes); i++)
		if (!strcmp(name, changes[i]) && ++shared->calls == kill_at)
			raise(SIGKILL);
	return 0;
}

/* One round of all that a writer does, from the step on. */
static void round_of_saves(struct pen_checkpoints *writer, uint64_t step)
{
	struct pen_checkpoint_removal *removal;
	const char *path;

	for (uint64_t i = step; i < step + 2; i++) {
		OK(step_save(writer, i, 0, (unsigned int)i, &kit_err));
		shared->committed = i;
	}
	OK(step_save(writer, step + 1, PEN_CHECKPOINT_OVERWRITE, (unsigned int)step + 9, &kit_err));
	OK(pen_checkpoints_begin(writer, step + 2, 1, 0, &path, &kit_err));
	OK(step_write(path, 1, &kit_err));
	OK(pen_checkpoints_abandon(writer, &kit_err));
	OK(pen_checkpoints_gc(writer, 1, 0, &removal, &kit_err));
	pen_checkpoint_removal_free(removal);
}

static void write_steps(uint64_t first, bool forever)
{
	struct pen_checkpoints *writer;

	sys_fault_hook = hook;
	writer = steps_open(folder, PEN_WRITE, 0);
	do {
		round_of_saves(writer, first);
		first += 2;
	} while (forever);
	pen_checkpoints_close(writer);
	_exit(0);
}

/* What was left is whole, and can be swept to nothing but that. */
static void look_after(void)
{
	struct pen_checkpoints *writer = steps_open(folder, PEN_WRITE, 0);
	struct pen_checkpoint_removal *removal;
	uint64_t latest = 0;

	CHECK(!strstr(steps_told(writer), "damaged"));
	/* It may be there though its writer was killed before it heard of it. */
	if (!pen_checkpoints_latest(writer, &latest, &kit_err)) {
		CHECK(latest >= shared->committed);
		OK(pen_checkpoints_verify(writer, latest, NULL, NULL, &kit_err));
		shared->committed = latest;
	}
	CHECK(!shared->committed || latest == shared->committed);
	OK(pen_checkpoints_sweep(writer, 0, &removal, &kit_err));
	CHECK_EQ(removal->left_count, 0);
	pen_checkpoint_removal_free(removal);
	CHECK(!strstr(steps_told(writer), "unfinished"));
	if (shared->committed) {
		char name[64];

		snprintf(name, sizeof(name), "f/step-%08llu", (unsigned long long)latest);
		CHECK_EQ(entries_in(in_scratch(name)), 2);
	}
	pen_checkpoints_close(writer);
}

static void setup(void)
{
	snprintf(folder, sizeof(folder), "%s", in_scratch("f"));
	shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1,
		      0);
	CHECK(shared != MAP_FAILED);
}

TEST(a_writer_killed_at_each_of_its_calls_leaves_whole_steps)
{
	unsigned int stride = TEST_SLOW_BUILD ? 7 : 1, kills = 0;
	int status;

	setup();
	for (kill_at = 1; kill_at < CALLS_MAX; kill_at += stride) {
		pid_t child;

		shared->calls = 0;
		child = fork();
		if (!child)
			write_steps(shared->committed + 1, false);
		CHECK(waitpid(child, &status, 0) == child);
		kit_at("killed at call %u", kill_at);
		if (WIFEXITED(status))
			break;
		kills++;
		look_after();
	}
	CHECK(WIFEXITED(status) && !WEXITSTATUS(status));
	CHECK(kills > 60 / stride);
}

TEST(a_writer_killed_at_random_moments_leaves_whole_steps)
{
	uint64_t state = 88172645463325252ull;

	setup();
	for (int kills = 0; kills < 60; kills++) {
		struct timespec wait = { 0 };
		pid_t child = fork();

		if (!child)
			write_steps(shared->committed + 1, true);
		state = state * 6364136223846793005ull + 1442695040888963407ull;
		wait.tv_nsec = (long)((state >> 33) % 40000000);
		nanosleep(&wait, NULL);
		CHECK(!kill(child, SIGKILL) && waitpid(child, NULL, 0) == child);
		look_after();
	}
	CHECK(shared->committed > 0);
}

TEST_MAIN
