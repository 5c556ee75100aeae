/* SPDX-License-Identifier: MIT */
/*
 * A writer is killed (SIGKILL) at random moments and at every single call it makes. Afterwards the
 * target holds the old bytes or the new ones, complete; never a mixture, never a part.
 *
 * Beside the target nothing is left: the file being written has no name. There is one exception,
 * which Linux offers no way around: between linkat, which gives it a temporary name, and rename,
 * which moves that over another file, a kill leaves ".NAME.penstock-NUMBER" behind. The aimed kills
 * assert that this is the only such place, and that a new file has none. Where files without a name
 * are not to be had, any kill may leave one. Either way the next writer in that folder removes it.
 *
 * The same of saves into a folder: the model there is the old one or the new one, of whatever shape
 * both are.
 *
 * Not covered: what a disk does when the power goes (test_power.c), and a kernel that dies with
 * its page cache.
 */
#include "../conform/kit.h"
#include "sys/fault.h"

#define SIZE_A (3 * MIB + 1)
#define SIZE_B (5 * MIB + 777)	/* worth a ring */
#define CALLS_MAX 1024
#define TENSORS 4

struct shared {
	atomic_uint calls, commits;
	char names[CALLS_MAX][32];
};

static struct shared *shared;
static unsigned int kill_at;	/* 0: never */
static bool no_unnamed;		/* as on NFS */
static char target[256];
static void *memory;

static int hook(const char *name)
{
	unsigned int call = ++shared->calls;

	if (call <= CALLS_MAX)
		snprintf(shared->names[call - 1], sizeof(shared->names[0]), "%s", name);
	if (call == kill_at)
		raise(SIGKILL);
	return no_unnamed && !strcmp(name, "O_TMPFILE") ? EOPNOTSUPP : 0;
}

static void setup(void)
{
	snprintf(target, sizeof(target), "%s/target", kit_folder(DISK));
	shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1,
		      0);
	memory = mmap(NULL, SIZE_B, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(shared != MAP_FAILED && memory != MAP_FAILED);
	pattern_fill(memory, SIZE_B, 0);
}

static void store(uint64_t size)
{
	struct pen_extent extent = { .memory = memory, .length = size };
	struct pen_device *host;

	OK(pen_device_open("host", &host, &kit_err));
	OK(pen_object_open(target, PEN_WRITE, size, &extent.object, &kit_err));
	OK(pen_transfer(PEN_WRITE, host, &extent, 1, NULL, NULL, &kit_err));
	OK(pen_object_commit(extent.object, &kit_err));
	shared->commits++;
	pen_object_close(extent.object);
	pen_device_close(host);
}

static unsigned int litter;

/* Count what lies beside the target; it must at least bear our name. */
static void count_litter(const char *path)
{
	if (!strcmp(path, target))
		return;
	CHECK(strstr(path, "/.target.penstock-") != NULL);
	litter++;
}

/* The next writer in the folder, of another file, which goes again. */
static void write_next(void)
{
	char next[300];
	struct pen_object *object;

	snprintf(next, sizeof(next), "%s/next", kit_folder(DISK));
	OK(pen_object_open(next, PEN_WRITE, 1, &object, &kit_err));
	pen_object_close(object);
}

/* The kernel takes the rings of a killed process apart, and with them its locks, a little later. */
static void check_litter_is_removed(void)
{
	unsigned int expected = access(target, F_OK) ? 0 : 1;

	for (int i = 0; i < 1000; i++) {
		write_next();
		if (kit_list(kit_folder(DISK), NULL) == expected)
			return;
		usleep(10000);
	}
	CHECK_EQ(kit_list(kit_folder(DISK), NULL), expected);
}

static bool whole(bool may_be_absent)
{
	return kit_holds(target, SIZE_A) || kit_holds(target, SIZE_B) ||
	       (may_be_absent && access(target, F_OK) < 0 && errno == ENOENT);
}

/* Write for ever; what is there before each write is nothing, or the other size. */
static void write_for_ever(bool replace)
{
	for (unsigned int i = 0;; i++) {
		if (!replace)
			unlink(target);
		store(i % 2 ? SIZE_A : SIZE_B);
	}
}

static void kill_at_random(bool replace)
{
	const int kills = 40;
	unsigned int left = 0;
	int status;

	setup();
	if (replace)
		store(SIZE_A);
	srand(20240607);
	for (int i = 0; i < kills; i++) {
		unsigned int wait = (unsigned int)rand() % (KIT_SANITIZED ? 150000 : 60000);
		pid_t child = fork();

		if (!child) {
			sys_fault_hook = no_unnamed ? hook : NULL;
			write_for_ever(replace);
		}
		CHECK(child > 0);
		usleep(wait);
		kill(child, SIGKILL);
		waitpid(child, &status, 0);
		kit_at("kill %d after %u us", i, wait);
		CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
		CHECK(whole(!replace));
		litter = 0;
		kit_list(kit_folder(DISK), count_litter);
		left += litter;
		/* The next child is the next writer, but for the last. */
		if (i % 4 == 3 || i == kills - 1)
			check_litter_is_removed();
	}
	printf("%u writes committed, %u temporary names left by %d kills\n", shared->commits,
	       left, kills);
	CHECK(shared->commits > 0);
	CHECK(left || !no_unnamed);
}

TEST(random_kills_leave_a_new_file_absent_or_whole)
{
	kill_at_random(false);
}

TEST(random_kills_leave_a_replaced_file_old_or_new)
{
	kill_at_random(true);
}

/* Of a new file the second linkat is the one: the first tries at open whether it will work. */
static bool puts_into_place(unsigned int k, bool replace)
{
	unsigned int links = 0;

	if (replace || no_unnamed)
		return !strcmp(shared->names[k - 1], "rename");
	for (unsigned int i = 0; i < k; i++)
		links += !strcmp(shared->names[i], "linkat");
	return links == 2 && !strcmp(shared->names[k - 1], "linkat");
}

static void kill_at_every_call(bool replace)
{
	bool renamed = false;
	unsigned int left = 0;
	int status;

	setup();
	for (unsigned int k = 1;; k++) {
		const char *name;
		pid_t child;

		unlink(target);
		if (replace)
			kit_pattern(target, SIZE_A);
		memset(shared, 0, sizeof(*shared));
		child = fork();
		CHECK(child >= 0);
		if (!child) {
			kill_at = k;
			sys_fault_hook = hook;
			store(SIZE_B);
			_exit(0);
		}
		waitpid(child, &status, 0);
		if (WIFEXITED(status) && !WEXITSTATUS(status)) {
			/* Fewer calls than k: the write went through. */
			CHECK(k > 10 && renamed && kit_holds(target, SIZE_B));
			CHECK_EQ(kit_list(kit_folder(DISK), NULL), 1);
			CHECK(left || (!replace && !no_unnamed));
			return;
		}
		CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL && k < CALLS_MAX);
		name = shared->names[k - 1];
		kit_at("call %u, %s", k, name);
		if (renamed)
			CHECK(kit_holds(target, SIZE_B));
		else
			CHECK(replace ? kit_holds(target, SIZE_A) : access(target, F_OK) < 0);
		litter = 0;
		kit_list(kit_folder(DISK), count_litter);
		if (no_unnamed)
			CHECK(litter <= 1);
		else
			CHECK_EQ(litter, !strcmp(name, "rename"));
		left += litter;
		check_litter_is_removed();
		/* The next call is killed after this one was made. */
		renamed |= puts_into_place(k, replace);
	}
}

TEST(a_kill_at_any_call_leaves_a_new_file_absent_or_whole)
{
	kill_at_every_call(false);
}

TEST(a_kill_at_any_call_leaves_a_replaced_file_old_or_new)
{
	kill_at_every_call(true);
}

TEST(random_kills_of_writers_that_need_names_leave_nothing_for_long)
{
	no_unnamed = true;
	kill_at_random(true);
}

TEST(a_kill_at_any_call_of_a_writer_that_needs_names_leaves_old_or_new)
{
	no_unnamed = true;
	kill_at_every_call(true);
}

TEST(a_kill_at_any_call_of_a_writer_that_needs_names_leaves_nothing_or_new)
{
	no_unnamed = true;
	kill_at_every_call(false);
}

/* ----------------------------------------------------------------------------------- models -- */

static const char *const names[TENSORS] = { "a", "b", "c", "d" };
static const uint64_t lengths[TENSORS] = { 5000, 3000, 4096, 70 };

/* A model of the bytes `seed`, in files of at most `shard_size`. */
static void save_model(int seed, uint64_t shard_size)
{
	struct pen_save_options options = PEN_SAVE_OPTIONS_INIT;
	struct pen_save_tensor tensors[TENSORS];
	struct pen_save *save;

	memset(memory, seed, 5000);
	for (int i = 0; i < TENSORS; i++)
		tensors[i] = (struct pen_save_tensor){ .name = names[i], .dtype = PEN_U8, .rank = 1,
						       .shape = &lengths[i], .memory = memory };
	options.shard_size = shard_size;
	OK(pen_save_start(kit_folder(SHM), tensors, TENSORS, &options, &save, &kit_err));
	OK(pen_save_wait(save, NULL, &kit_err));
}

/* The one byte that all of the model in the folder has; -1: there is no whole one. */
static int seed_of_model(void)
{
	const struct pen_tensor *tensors;
	unsigned char bytes[5000];
	struct pen_device *host;
	struct pen_model *model;
	int seed = -1;

	if (pen_model_open(kit_folder(SHM), &model, &kit_err))
		return -1;
	OK(pen_device_open("host", &host, &kit_err));
	CHECK_EQ(pen_model_tensors(model, &tensors), TENSORS);
	for (int i = 0; i < TENSORS; i++) {
		struct pen_placement placement = { .tensor = &tensors[i], .memory = bytes };
		struct pen_job *job;

		OK(pen_load_start(model, host, &placement, 1, NULL, &job, &kit_err));
		OK(pen_job_wait(job, NULL, &kit_err));
		for (uint64_t k = 0; k < tensors[i].bytes; k++) {
			CHECK(seed < 0 || bytes[k] == seed);
			seed = bytes[k];
		}
	}
	pen_device_close(host);
	pen_model_close(model);
	return seed;
}

static void kill_model_at_every_call(uint64_t old, uint64_t new)
{
	bool is_new = false;
	int status;

	/* A sanitizer has seen enough at every third. */
	for (unsigned int k = 1;; k += KIT_SANITIZED ? 3 : 1) {
		pid_t child;
		int seed;

		/* Finishes what the last one left, too. */
		save_model(1, old);
		memset(shared, 0, sizeof(*shared));
		child = fork();
		CHECK(child >= 0);
		if (!child) {
			kill_at = k;
			sys_fault_hook = hook;
			save_model(2, new);
			_exit(0);
		}
		waitpid(child, &status, 0);
		kit_at("%llu to %llu, call %u, %s", (unsigned long long)old,
		       (unsigned long long)new, k,
		       k <= CALLS_MAX ? shared->names[k - 1] : "");
		seed = seed_of_model();
		if (WIFEXITED(status) && !WEXITSTATUS(status)) {
			/* Fewer calls than k: the save went through. */
			CHECK(k > 50 && is_new && seed == 2);
			return;
		}
		CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL && k < CALLS_MAX);
		CHECK(is_new ? seed == 2 : seed == 1 || seed == 2);
		is_new = seed == 2;
	}
}

/* Three files, two, and one. */
static void kill_models_after(uint64_t old)
{
	setup();
	kill_model_at_every_call(old, 5000);
	kill_model_at_every_call(old, 9000);
	kill_model_at_every_call(old, 1 << 20);
}

TEST_SLOW(a_kill_at_any_call_of_a_save_over_three_files_leaves_one_whole_model)
{
	kill_models_after(5000);
}

TEST_SLOW(a_kill_at_any_call_of_a_save_over_two_files_leaves_one_whole_model)
{
	kill_models_after(9000);
}

TEST_SLOW(a_kill_at_any_call_of_a_save_over_one_file_leaves_one_whole_model)
{
	kill_models_after(1 << 20);
}

TEST_MAIN
