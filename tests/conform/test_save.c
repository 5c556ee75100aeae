/* SPDX-License-Identifier: MIT */
/*
 * Saves of tensors of any memories - the host's, two GPUs' - as one file and as folders of shards:
 * what is read back is what was saved; whatever goes wrong leaves the folder as it was; one model
 * takes the place of another, of whatever shape both are.
 */
#include <sys/mount.h>
#include "kit.h"
#include "sys/fault.h"

#define TENSORS 60u
#define MOST (200 * KIB)

static struct pen_device *devices[3];
static unsigned int used = TENSORS;
static struct pen_save_tensor tensors[TENSORS];
static uint64_t shapes[TENSORS];
static char names[TENSORS][32], folder[300];
static unsigned char bytes[MOST], wanted[MOST];

static void fill(unsigned int number, unsigned int seed)
{
	for (uint64_t i = 0; i < shapes[number]; i++)
		wanted[i] = (unsigned char)(i * 7 + number * 31 + seed + i / 251);
}

/* Tensors of all sizes, each on a device of its own choice. */
static void make_tensors(unsigned int seed)
{
	devices[0] = kit_device("host");
	devices[1] = kit_device("cuda:0");
	devices[2] = devices[1] ? kit_device("cuda:1") : NULL;
	if (devices[1] && !devices[2])
		devices[2] = kit_device("cuda:0");
	for (unsigned int i = 0; i < used; i++) {
		struct pen_device *device = devices[i % 3] ? devices[i % 3] : devices[0];

		snprintf(names[i], sizeof(names[i]), "layer.%02u", i);
		shapes[i] = i * i * 7919 % MOST;
		tensors[i] = (struct pen_save_tensor){ .name = names[i], .dtype = PEN_U8, .rank = 1,
						       .shape = &shapes[i], .device = device };
		OK(pen_device_alloc(device, shapes[i], &tensors[i].memory, &kit_err));
		fill(i, seed);
		OK(pen_device_put(device, tensors[i].memory, wanted, shapes[i], &kit_err));
	}
	snprintf(folder, sizeof(folder), "%s", kit_folder(DISK));
}

static void change(unsigned int seed)
{
	for (unsigned int i = 0; i < used; i++) {
		fill(i, seed);
		OK(pen_device_put(tensors[i].device, tensors[i].memory, wanted, shapes[i],
				  &kit_err));
	}
}

static void end(void)
{
	for (unsigned int i = 0; i < used; i++)
		OK(pen_device_free(tensors[i].device, tensors[i].memory, shapes[i], &kit_err));
	pen_trim();
	for (int i = 0; i < 3; i++)
		pen_device_close(devices[i]);
	CHECK_EQ(kit_leaks(), 0);
}

/* Does the path lead to a model of these tensors with these bytes? */
static bool holds(const char *path, unsigned int seed)
{
	struct pen_model *model;
	bool good = true;

	if (pen_model_open(path, &model, &kit_err))
		return false;
	good = pen_model_tensors(model, &(const struct pen_tensor *){ NULL }) == used;
	for (unsigned int i = 0; good && i < used; i++) {
		struct pen_placement placement = { .tensor = pen_model_find(model, names[i]),
						   .memory = bytes };
		struct pen_job *job;

		OK(pen_load_start(model, devices[0], &placement, 1, NULL, &job, &kit_err));
		OK(pen_job_wait(job, NULL, &kit_err));
		fill(i, seed);
		good = !memcmp(bytes, wanted, shapes[i]);
	}
	pen_model_close(model);
	return good;
}

static int save(const char *path, uint64_t align, uint64_t shard_size, struct pen_report *report)
{
	struct pen_save_options options = PEN_SAVE_OPTIONS_INIT;
	struct pen_progress progress;
	struct pen_save *saving;
	int rc;

	options.align = align;
	options.shard_size = shard_size;
	rc = pen_save_start(path, tensors, used, &options, &saving, &kit_err);
	if (rc)
		return rc;
	while (pen_save_wait_for(saving, 0.01))
		;
	pen_save_poll(saving, &progress);
	CHECK(progress.total > 0 && progress.bytes <= progress.total);
	return pen_save_wait(saving, report, &kit_err);
}

static const char *in(const char *name)
{
	static char path[512];

	snprintf(path, sizeof(path), "%s/%s", folder, name);
	return path;
}

TEST(one_job_saves_the_tensors_of_all_devices)
{
	struct pen_report report = PEN_REPORT_INIT;
	uint64_t total = 0;

	make_tensors(1);
	if (!devices[2])
		SKIP("there is no GPU, not even a fake one");
	for (unsigned int i = 0; i < used; i++)
		total += shapes[i];
	for (uint64_t align = 0; align <= 4096; align += 4096) {
		OK(save(in("x.safetensors"), align, 0, &report));
		CHECK(holds(in("x.safetensors"), 1));
		CHECK(report.bytes > total);
		CHECK_EQ(kit_list(folder, NULL), 1);
	}
	end();
}

/* With the tensors where a disk wants them, whole blocks go around the page cache. */
TEST(an_aligned_save_is_one_run_of_whole_blocks)
{
	struct pen_report report = PEN_REPORT_INIT;
	struct pen_save_options options = PEN_SAVE_OPTIONS_INIT;
	struct pen_options transfer = PEN_OPTIONS_INIT;
	struct pen_save *saving;

	if (!kit_has_direct() || !kit_has_uring()) {
		kit_not_run("direct writes by io_uring");
		SKIP("direct writes by io_uring are not to be had here");
	}
	make_tensors(1);
	options.align = 4096;
	options.transfer = &transfer;
	OK(pen_save_start(in("x.safetensors"), tensors, used, &options, &saving, &kit_err));
	OK(pen_save_wait(saving, &report, &kit_err));
	CHECK(kit_has_path(&report, "direct-uring"));
	/* One for each stretch of some MiB and one for the ragged end, not one for each tensor. */
	CHECK(report.requests < TENSORS / 2);
	end();
}

static const uint64_t shard_sizes[] = { 1 << 20, 2 << 20, 1ull << 40, 300 << 10 };

TEST(a_model_takes_the_place_of_another_of_any_shape)
{
	make_tensors(0);
	for (unsigned int seed = 1, from = 0; from < COUNT(shard_sizes); from++)
		for (unsigned int to = 0; to < COUNT(shard_sizes); to++) {
			kit_at("%u to %u", from, to);
			change(++seed);
			OK(save(folder, 4096, shard_sizes[from], NULL));
			CHECK(holds(folder, seed));
			change(++seed);
			OK(save(folder, 4096, shard_sizes[to], NULL));
			CHECK(holds(folder, seed));
			CHECK(!access(in("model.safetensors"), F_OK) == (to == 2));
			CHECK(!access(in("model.safetensors.index.json"), F_OK) == (to != 2));
		}
	end();
}

TEST(what_is_not_the_models_stays_and_what_was_its_goes)
{
	make_tensors(1);
	kit_write(in("config.json"), 0, 2, '1');
	kit_write(in("adapter.safetensors"), 0, 2, '1');
	kit_write(in("model-00001-of-00099.safetensors"), 0, 2, '1');
	kit_write(in("model.safetensors"), 0, 2, '1');
	kit_write(in("model-00001-of-00002.penstock-0123456789abcdef.safetensors"), 0, 2, '1');
	kit_write(in("model-00001-of-00002.penstock-0123456789abcdeX.safetensors"), 0, 2, '1');
	OK(save(folder, 0, 4 << 20, NULL));
	CHECK(holds(folder, 1));
	CHECK(!access(in("config.json"), F_OK) && !access(in("adapter.safetensors"), F_OK));
	CHECK(access(in("model-00001-of-00099.safetensors"), F_OK) < 0);
	CHECK(access(in("model.safetensors"), F_OK) < 0);
	CHECK(access(in("model-00001-of-00002.penstock-0123456789abcdef.safetensors"), F_OK) < 0);
	CHECK(!access(in("model-00001-of-00002.penstock-0123456789abcdeX.safetensors"), F_OK));
	end();
}

/* ------------------------------------------------------------------------- what goes wrong -- */

static const char *failing;
static atomic_int calls_left;	/* before one fails */
static bool for_good;

static int hook(const char *name)
{
	int left;

	if (!failing || strcmp(name, failing))
		return 0;
	left = --calls_left;
	return left < 0 && (for_good || left == -1) ? EIO : 0;
}

static int failing_save(const char *call, int number, bool good, uint64_t shard_size)
{
	int rc;

	failing = call;
	calls_left = number;
	for_good = good;
	sys_fault_hook = hook;
	rc = save(folder, 0, shard_size, NULL);
	sys_fault_hook = NULL;
	return rc;
}

/*
 * One call of a save is failed, the first, the second and so on until none is left. What it finds
 * and would write are the old model (`seed`) and the new one (`seed` + 1).
 */
static void fail_each(const char *call, bool good, uint64_t old, uint64_t new, unsigned int seed)
{
	unsigned int files;

	change(seed);
	OK(save(folder, 0, old, NULL));
	files = kit_list(folder, NULL);
	/* A sanitizer has seen enough at every third. */
	for (int number = 0;; number += KIT_SANITIZED ? 3 : 1) {
		int rc;

		kit_at("%llu to %llu, %s %d %d", (unsigned long long)old, (unsigned long long)new,
		       call, number, good);
		change(seed + 1);
		rc = failing_save(call, number, good, new);
		CHECK(!rc || kit_err.message[0]);
		/* Fewer calls than that: it went through. */
		if (calls_left >= 0) {
			CHECK(!rc && holds(folder, seed + 1));
			return;
		}
		/* Or it stepped down, or a folder that is new could not be flushed. */
		if (!rc || !holds(folder, seed))
			CHECK(holds(folder, seed + 1) && (!rc || !strcmp(call, "fsync")));
		/* What fails for good fails when it is to be undone, too. */
		else if (!good)
			CHECK_EQ(kit_list(folder, NULL), files);
		change(seed);
		OK(save(folder, 0, old, NULL));
		CHECK_EQ(kit_list(folder, NULL), files);
	}
}

TEST_SLOW(an_error_leaves_the_old_model_and_nothing_beside_it)
{
	static const char *const calls[] = { "fdatasync", "fsync", "linkat", "rename", "fallocate",
					     "O_TMPFILE" };
	/* Two files, three and one, in each order. */
	static const uint64_t sizes[] = { 400 << 10, 200 << 10, 1ull << 40 };
	unsigned int seed = 0;

	used = 8;
	make_tensors(seed);
	snprintf(folder, sizeof(folder), "%s", kit_folder(SHM));
	for (unsigned int i = 0; i < COUNT(sizes) * COUNT(sizes); i++)
		for (size_t c = 0; c < COUNT(calls); c++)
			for (int good = 0; good < 2; good++)
				fail_each(calls[c], good, sizes[i / 3], sizes[i % 3], seed += 2);
	end();
}

TEST(a_store_that_fails_leaves_the_old_file_and_one_error)
{
	static const char *const specs[] = { "fail:*:EIO", "fail:2+:EIO", "fail:1:ENOSPC" };
	struct pen_save_options options = PEN_SAVE_OPTIONS_INIT;
	struct pen_options transfer = PEN_OPTIONS_INIT;
	struct pen_save *saving;

	make_tensors(1);
	options.transfer = &transfer;
	OK(save(in("x.safetensors"), 0, 0, NULL));
	change(2);
	for (size_t i = 0; i < COUNT(specs); i++) {
		kit_at("%s", specs[i]);
		transfer.inject = specs[i];
		OK(pen_save_start(in("x.safetensors"), tensors, used, &options, &saving,
				  &kit_err));
		CHECK(pen_save_wait(saving, NULL, &kit_err) < 0);
		CHECK(kit_err.message[0] && holds(in("x.safetensors"), 1));
		CHECK_EQ(kit_list(folder, NULL), 1);
	}
	end();
}

TEST(a_save_that_is_cancelled_changes_nothing_however_late)
{
	struct pen_save_options options = PEN_SAVE_OPTIONS_INIT;
	struct pen_save *saving;

	make_tensors(1);
	OK(save(folder, 0, 1 << 20, NULL));
	change(2);
	for (int late = 0; late < 2; late++) {
		unsigned int descriptors = kit_descriptors(), files = kit_list(folder, NULL);

		options.shard_size = 1 << 20;
		OK(pen_save_start(folder, tensors, used, &options, &saving, &kit_err));
		while (late && pen_save_wait_for(saving, 1))
			;
		pen_save_cancel(saving);
		REFUSED(-ECANCELED, pen_save_wait(saving, NULL, &kit_err));
		CHECK(holds(folder, 1));
		CHECK_EQ(kit_list(folder, NULL), files);
		CHECK_EQ(kit_descriptors(), descriptors);
	}
	end();
}

TEST(a_folder_that_goes_away_meanwhile_is_one_clear_error)
{
	struct pen_save_options options = PEN_SAVE_OPTIONS_INIT;
	struct pen_save *saving;

	make_tensors(1);
	for (options.shard_size = 0; options.shard_size <= 1 << 20; options.shard_size += 1 << 20) {
		snprintf(folder, sizeof(folder), "%s/sub", kit_folder(DISK));
		CHECK(!mkdir(folder, 0755));
		OK(pen_save_start(options.shard_size ? folder : in("x.safetensors"), tensors,
				  used, &options, &saving, &kit_err));
		CHECK(!rmdir(folder));
		REFUSED(-ENOENT, pen_save_wait(saving, NULL, &kit_err));
		CHECK(kit_err.hint[0]);
		CHECK_EQ(kit_list(kit_folder(DISK), NULL), 0);
	}
	end();
}

TEST(a_disk_that_is_too_small_or_read_only_is_refused_at_the_start)
{
	struct pen_save_options options = PEN_SAVE_OPTIONS_INIT;
	struct pen_save *saving;

	make_tensors(1);
	snprintf(folder, sizeof(folder), "%s/small", kit_folder(DISK));
	CHECK(!mkdir(folder, 0755));
	if (geteuid() || mount("none", folder, "tmpfs", 0, "size=3m"))
		SKIP("a tmpfs cannot be mounted here");
	options.shard_size = 1 << 20;
	REFUSED(-ENOSPC, pen_save_start(folder, tensors, used, &options, &saving, &kit_err));
	CHECK_EQ(kit_list(folder, NULL), 0);
	CHECK(!mount("none", folder, "tmpfs", MS_REMOUNT | MS_RDONLY, NULL));
	REFUSED(-EROFS, pen_save_start(folder, tensors, 2, &options, &saving, &kit_err));
	CHECK(!umount(folder) && !rmdir(folder));
	REFUSED(-ENOENT, pen_save_start(folder, tensors, used, &options, &saving, &kit_err));
	kit_write(folder, 0, 1, 'x');
	REFUSED(-ENOTDIR, pen_save_start(folder, tensors, used, &options, &saving, &kit_err));
	end();
}

/* A file of its own keeps the rights that it had. */
TEST(files_that_are_replaced_keep_their_rights)
{
	struct stat st;

	make_tensors(1);
	OK(save(folder, 0, 4 << 20, NULL));
	CHECK(!chmod(in("model-00001-of-00002.safetensors"), 0600));
	CHECK(!chmod(in("model.safetensors.index.json"), 0640));
	OK(save(folder, 0, 4 << 20, NULL));
	CHECK(!stat(in("model-00001-of-00002.safetensors"), &st));
	CHECK_EQ(st.st_mode & 07777, 0600);
	CHECK(!stat(in("model.safetensors.index.json"), &st));
	CHECK_EQ(st.st_mode & 07777, 0640);
	end();
}

TEST(a_report_without_a_size_is_refused_and_the_save_lives_on)
{
	struct pen_report report = { .size = 0 };
	struct pen_save *saving;

	make_tensors(1);
	OK(pen_save_start(in("x.safetensors"), tensors, used, NULL, &saving, &kit_err));
	REFUSED(-EINVAL, pen_save_wait(saving, &report, &kit_err));
	OK(pen_save_wait(saving, NULL, &kit_err));
	CHECK(holds(in("x.safetensors"), 1));
	end();
}

TEST_MAIN
