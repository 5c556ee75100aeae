/* SPDX-License-Identifier: MIT */
/*
 * For k = 1, 2, 3 ... the k-th call that leaves the program - system call, driver call, allocation
 * - fails, once or together with all that follow, until a run makes fewer than k calls. Whatever
 * fails, a run must come back, and either say in words what went wrong or have stepped down and
 * moved the right bytes; it leaks no descriptor, no memory and nothing of the driver's, and leaves
 * a stored destination old or new, with nothing beside it.
 *
 * Each run is a process of its own, so that a hang or a crash is one bad k that names itself, and
 * what is done once per process is failed too. In a long row of the same call only the ends and a
 * sample are failed: the middle of a row teaches nothing new.
 *
 * Not failed: calls that only give things back (cuMemHostUnregister, unlink ...). When they fail,
 * what they should have given back is lost by definition; the engine must only survive it, which
 * the last case checks.
 */
#include "../conform/kit.h"
#include "base/form.h"
#include "sys/fault.h"

#define SIZE (5 * MIB + 4097)	/* more than one piece, worth a ring, with a ragged end */
#define OLD_SIZE 70000
#define CALLS_MAX 8192
#define HANG_SECONDS (KIT_SANITIZED ? 30 : 5)

struct scenario {
	const char *path;	/* that a clean run takes, as the report calls it */
	const char *device;
	enum pen_mode mode;
	int transfer;
	uint64_t size;
	bool hot, replaces;
	bool allocates;		/* the job allocates the memory it reads into */
	const char *inject;	/* what a store does besides; a write then asks for groups */
	bool saves;		/* as a tensor of a safetensors file */
	uint64_t form;		/* that a read gives its bytes; one that keeps their number */
};

enum { ONCE, FOR_GOOD };

static struct {
	atomic_uint calls;
	atomic_bool armed, gave_up;	/* gave_up: a call that gives back was failed */
	unsigned int k;
	int how, code;
	bool all;			/* also the calls that give back */
} fault;

/* The calls of a clean run, by number; behind them the one that was failed. Shared. */
static char (*trace)[48];
static unsigned int trace_count;

static bool gives_back(const char *name)
{
	static const char *const names[] = {
		"cuMemHostUnregister", "cuMemFree_v2", "cuCtxPushCurrent_v2", "unlink",
	};

	for (size_t i = 0; i < COUNT(names); i++)
		if (!strcmp(name, names[i]))
			return true;
	return false;
}

static int hook(const char *name)
{
	unsigned int call;

	if (!fault.armed || (gives_back(name) && !fault.all))
		return 0;
	call = ++fault.calls;
	if (!fault.k && call <= CALLS_MAX)
		snprintf(trace[call - 1], sizeof(trace[0]), "%s", name);
	if (!fault.k || (fault.how == ONCE ? call != fault.k : call < fault.k))
		return 0;
	if (call == fault.k)
		snprintf(trace[CALLS_MAX], sizeof(trace[0]), "%s", name);
	if (gives_back(name))
		fault.gave_up = true;
	return fault.code;
}

/* ---------------------------------------------------------------------------------- one run -- */

static char source[256], target[256];

static void prepare(const struct scenario *scenario)
{
	snprintf(source, sizeof(source), "%s/source", kit_folder(DISK));
	snprintf(target, sizeof(target), "%s/target", kit_folder(DISK));
	if (scenario->mode == PEN_READ)
		kit_pattern(source, scenario->size);
}

/* The state of the store before each run. */
static void reset(const struct scenario *scenario)
{
	if (scenario->mode == PEN_READ && scenario->hot)
		kit_warm(source, 0, 0);
	else if (scenario->mode == PEN_READ)
		kit_cool(source, 0, 0);
	if (scenario->mode == PEN_READ)
		return;
	unlink(target);
	if (scenario->replaces)
		kit_write(target, 0, OLD_SIZE, 0x77);
}

static bool is_old(const struct scenario *scenario)
{
	unsigned char bytes[OLD_SIZE + 1];
	ssize_t n;
	int fd;

	fd = open(target, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return errno == ENOENT && !scenario->replaces;
	n = pread(fd, bytes, sizeof(bytes), 0);
	close(fd);
	for (ssize_t i = 0; i < n; i++)
		if (bytes[i] != 0x77)
			return false;
	return n == OLD_SIZE;
}

/* Bytes of a device, seen without faults. */
static void check_memory(struct pen_device *device, void *memory, const struct scenario *scenario)
{
	const struct form *form = form_of(scenario->form);
	uint64_t size = scenario->size;
	unsigned char *mirror = malloc(size), *expected = malloc(size), *formed = malloc(size);

	OK(pen_device_get(device, mirror, memory, size, &kit_err));
	pattern_fill(expected, size, 0);
	if (form)
		form->apply(formed, expected, size / form->from_size);
	CHECK(!memcmp(mirror, form ? formed : expected, size));
	free(mirror);
	free(expected);
	free(formed);
}

static void fill_memory(struct pen_device *device, void *memory, uint64_t size)
{
	unsigned char *mirror = malloc(size);

	pattern_fill(mirror, size, 0);
	OK(pen_device_put(device, memory, mirror, size, &kit_err));
	free(mirror);
}

/* The tensor of a saved file; not at all, if that is no such file. */
static bool holds_tensor(uint64_t size)
{
	unsigned char *bytes = malloc(size);
	const struct pen_tensor *tensor;
	struct pen_model *model;
	bool good = false;
	int fd;

	if (!pen_model_open(target, &model, NULL)) {
		tensor = pen_model_find(model, "t");
		fd = open(target, O_RDONLY | O_CLOEXEC);
		good = tensor && tensor->bytes == size &&
		       pread(fd, bytes, size, (off_t)tensor->offset) == (ssize_t)size &&
		       pattern_check(bytes, size, 0) == size;
		close(fd);
		pen_model_close(model);
	}
	free(bytes);
	return good;
}

static int save(const struct scenario *scenario, struct pen_device *device, void *memory,
		const struct pen_options *transfer, struct pen_report *report)
{
	struct pen_save_tensor tensor = { .name = "t", .dtype = PEN_U8, .rank = 1,
					  .shape = &scenario->size, .memory = memory,
					  .device = device };
	struct pen_save_options options = { .size = sizeof(options), .align = 4096,
					    .transfer = transfer };
	struct pen_save *saving;
	int rc = pen_save_start(target, &tensor, 1, &options, &saving, &kit_err);

	return rc ? rc : pen_save_wait(saving, report, &kit_err);
}

/* From opening the device to the commit, every call subject to the fault. */
static int move(const struct scenario *scenario)
{
	struct pen_options options = { .size = sizeof(options), .transfer = scenario->transfer };
	struct pen_extent extent = { .length = scenario->size, .form = scenario->form };
	bool read = scenario->mode == PEN_READ;
	struct pen_report report = PEN_REPORT_INIT;
	struct pen_device *device = NULL;
	void *memory = NULL;
	int rc;

	if (scenario->allocates) {
		options.allocate = scenario->size;
		options.allocated = &memory;
	}
	options.inject = scenario->inject;
	options.groups = scenario->inject && !read;

	fault.armed = true;
	rc = pen_device_open(scenario->device, &device, &kit_err);
	if (!rc && !scenario->allocates) {
		rc = pen_device_alloc(device, scenario->size, &memory, &kit_err);
		extent.memory = memory;
	}
	if (!rc && !read) {
		fault.armed = false;
		fill_memory(device, memory, scenario->size);
		fault.armed = true;
	}
	if (!rc && scenario->saves)
		rc = save(scenario, device, memory, &options, &report);
	else if (!rc)
		rc = pen_object_open(read ? source : target, scenario->mode,
				     read ? 0 : scenario->size, &extent.object, &kit_err);
	if (!rc && !scenario->saves)
		rc = pen_transfer(scenario->mode, device, &extent, 1, &options, &report,
				  &kit_err);
	CHECK(fault.k || kit_has_path(&report, scenario->path));
	if (!rc && !read && !scenario->saves)
		rc = pen_object_commit(extent.object, &kit_err);
	if (rc) {
		CHECK_EQ(kit_err.code, rc);
		CHECK(rc < 0 && kit_err.message[0] && kit_err.operation[0]);
	}
	pen_object_close(extent.object);
	fault.armed = false;
	/* What the driver still holds after a failed give-back may lie where the mirror will. */
	if (!rc && read && !fault.gave_up)
		check_memory(device, memory, scenario);
	if (memory)
		OK(pen_device_free(device, memory, scenario->size, &kit_err));
	pen_device_close(device);
	return rc;
}

static void check_store(const struct scenario *scenario, int rc)
{
	bool is_new;

	if (scenario->mode == PEN_READ)
		return;
	is_new = scenario->saves ? holds_tensor(scenario->size)
				 : kit_holds(target, scenario->size);
	CHECK(rc ? is_new || is_old(scenario) : is_new);
	if (!fault.gave_up)
		CHECK(kit_list(kit_folder(DISK), NULL) <= 1);
}

/* One run with the k-th call failing (0: none). Exits; the parent looks at the status. */
static void run(const struct scenario *scenario, unsigned int k, int how)
{
	static const int codes[] = { EIO, ENOMEM, ENOSPC, EAGAIN };
	unsigned int descriptors = kit_descriptors();
	int rc;

	alarm(HANG_SECONDS);
	fault.k = k;
	fault.how = how;
	fault.code = codes[(k + (unsigned int)how) % COUNT(codes)];
	sys_fault_hook = hook;
	rc = move(scenario);
	check_store(scenario, rc);
	pen_trim();
	CHECK_EQ(kit_descriptors(), descriptors);
	if (fault.gave_up)
		_exit(0);
	CHECK_EQ(kit_leaks(), 0);
	if (!k)
		CHECK_EQ(rc, 0);
	exit(0);
}

/* ------------------------------------------------------------------------------- every run -- */

static unsigned int shown;

static bool forked(const struct scenario *scenario, unsigned int k, int how)
{
	pid_t child;
	int status;

	reset(scenario);
	fflush(NULL);
	child = fork();
	if (!child)
		run(scenario, k, how);
	CHECK(child > 0);
	waitpid(child, &status, 0);
	if (WIFEXITED(status) && !WEXITSTATUS(status))
		return true;
	if (shown++ < 20)
		fprintf(stderr, "^ %s %s when call %u (%s) %s\n", scenario->device,
			!WIFSIGNALED(status) ? "went wrong"
			: WTERMSIG(status) == SIGALRM ? "hung" : "crashed",
			k, trace[CALLS_MAX],
			how == ONCE ? "fails once" : "and later fail");
	return false;
}

/* Is this call in the middle of a long row of the same? */
static bool dull(unsigned int k)
{
	const unsigned int ends = 3;

	if (k <= ends || k + ends > trace_count || k % 61 == 0)
		return false;
	for (unsigned int i = k - ends; i < k + ends; i++)
		if (strcmp(trace[i - 1], trace[k - 1]))
			return false;
	return true;
}

static void fail_every_call(struct scenario scenario)
{
	bool direct = strcmp(scenario.path, "cached") && strcmp(scenario.path, "mapped");
	unsigned int bad = 0, runs = 0;
	struct pen_device *device;

	if ((direct && !kit_has_direct()) ||
	    (!strcmp(scenario.path, "direct-uring") && !kit_has_uring())) {
		kit_not_run("%s", scenario.path);
		SKIP("the path that this is about is not to be had here");
	}
	if (strcmp(scenario.device, "host")) {
		pid_t child = fork();
		int status;

		if (!child) {
			device = kit_device(scenario.device);
			pen_device_close(device);
			_exit(!device);
		}
		waitpid(child, &status, 0);
		if (status)
			SKIP("there is no GPU, not even a fake one");
	}
	trace = mmap(NULL, (CALLS_MAX + 1) * sizeof(trace[0]), PROT_READ | PROT_WRITE,
		     MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	CHECK(trace != MAP_FAILED);
	prepare(&scenario);
	CHECK(forked(&scenario, 0, ONCE));
	while (trace_count < CALLS_MAX && trace[trace_count][0])
		trace_count++;
	CHECK(trace_count > 10);
	/* A little further than the clean run went: retries and steps down make more calls. */
	for (unsigned int k = 1; k <= trace_count + 10; k++) {
		if (k <= trace_count && dull(k))
			continue;
		for (int how = ONCE; how <= FOR_GOOD; how++, runs++)
			bad += !forked(&scenario, k, how);
	}
	printf("%u calls, %u runs, %u bad\n", trace_count, runs, bad);
	CHECK_EQ(bad, 0);
}

TEST(cold_read_to_the_host)
{
	fail_every_call((struct scenario){ "direct-uring", "host", PEN_READ, PEN_AUTO, SIZE });
}

TEST(small_cold_read_to_the_host)
{
	fail_every_call((struct scenario){ "direct-threads", "host", PEN_READ, PEN_AUTO,
					   MIB + 1 });
}

TEST(hot_read_to_the_gpu)
{
	fail_every_call((struct scenario){ "cached", "cuda:0", PEN_READ, PEN_AUTO, SIZE,
					   .hot = true });
}

TEST(read_into_memory_of_the_jobs_own)
{
	fail_every_call((struct scenario){ "cached", "cuda:0", PEN_READ, PEN_AUTO, SIZE,
					   .hot = true, .allocates = true });
}

TEST(read_to_the_gpu_in_another_form)
{
	fail_every_call((struct scenario){ "cached", "cuda:0", PEN_READ, PEN_AUTO, SIZE - 1,
					   .hot = true, .form = PEN_FORM_BF16_TO_F16 });
}

TEST(cold_read_to_the_gpu_by_io_uring)
{
	fail_every_call((struct scenario){ "direct-uring", "cuda:0", PEN_READ,
					   PEN_CPU_ASYNC_GPU, SIZE });
}

TEST(write_of_a_new_file_from_the_host)
{
	fail_every_call((struct scenario){ "direct-uring", "host", PEN_WRITE, PEN_AUTO, SIZE });
}

TEST_SLOW(write_over_a_file_from_the_gpu)
{
	fail_every_call((struct scenario){ "direct-uring", "cuda:0", PEN_WRITE, PEN_AUTO, SIZE,
					   .replaces = true });
}

TEST_SLOW(save_of_a_gpus_tensor_over_a_file)
{
	fail_every_call((struct scenario){ "direct-uring", "cuda:0", PEN_WRITE, PEN_AUTO, SIZE,
					   .replaces = true, .saves = true });
}

/* The lane changes its queue while what it gathered waits to be sent. */
TEST(write_whose_path_is_barred)
{
	fail_every_call((struct scenario){ "direct-threads", "cuda:0", PEN_WRITE, PEN_AUTO, SIZE,
					   .inject = "fail:2:EINVAL" });
}

TEST(mapped_read)
{
	fail_every_call((struct scenario){ "mapped", "cuda:0", PEN_READ, PEN_MAPPED, SIZE,
					   .hot = true });
}

TEST(cufile_sync_read)
{
	fail_every_call((struct scenario){ "cufile-compat", "cuda:0", PEN_READ, PEN_GPU_DIRECT,
					   SIZE });
}

TEST(cufile_stream_read)
{
	fail_every_call((struct scenario){ "cufile-compat", "cuda:0", PEN_READ,
					   PEN_GPU_DIRECT_ASYNC, SIZE });
}

TEST(cufile_batch_read)
{
	fail_every_call((struct scenario){ "cufile-compat", "cuda:0", PEN_READ, PEN_GPU_BATCH,
					   SIZE });
}

TEST(cufile_batch_stream_read)
{
	fail_every_call((struct scenario){ "cufile-compat", "cuda:0", PEN_READ,
					   PEN_GPU_BATCH_STREAM, SIZE });
}

TEST_SLOW(cufile_batch_write_over_a_file)
{
	fail_every_call((struct scenario){ "cufile-compat", "cuda:0", PEN_WRITE, PEN_GPU_BATCH,
					   SIZE, .replaces = true });
}

TEST(failing_to_give_things_back_is_survived)
{
	fault.all = true;
	fail_every_call((struct scenario){ "mapped", "cuda:0", PEN_READ, PEN_MAPPED, MIB,
					   .hot = true });
}

TEST_MAIN
