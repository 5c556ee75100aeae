/* SPDX-License-Identifier: MIT */
/*
 * Several loads at once from several threads, each with its own job on the same device: some run
 * to their end, some are cancelled in the middle, some fail. They share the pool of staging memory,
 * the tuner's memory and the device's streams and events. Every byte of a job that says it is done
 * is right, each keeps its promise of memory, and nothing is left behind.
 */
#include <pthread.h>
#include "kit.h"
#include "sys/os.h"

#define THREADS 6
#define JOBS (KIT_SANITIZED ? 20 : 60)	/* of each thread */
#define SIZE (9 * MIB + 4321)
#define LIMIT (12 * MIB)

enum fate { RUNS, WRITES, CANCELLED, FAILS, REFUSED_AT_START, FATES };

static struct pen_device *device;
static char path[256];
static atomic_uint done[FATES], unexpected;

struct loader {
	pthread_t thread;
	unsigned int index;
	uint64_t seed;
	void *memory;
	unsigned char *copy;
	struct pen_error err;
};

static uint32_t chance(struct loader *loader, uint32_t below)
{
	loader->seed = loader->seed * 6364136223846793005ull + 1442695040888963407ull;
	return (uint32_t)(loader->seed >> 33) % below;
}

/* A thread does not exit(): it says what is wrong, and the case fails at its end. */
static void wrong(struct loader *loader, enum fate fate, const char *what)
{
	char text[1024];

	pen_error_format(&loader->err, text, sizeof(text));
	fprintf(stderr, "thread %u, fate %d: %s (%s)\n", loader->index, (int)fate, what, text);
	unexpected++;
}

static struct pen_options options_for(struct loader *loader, enum fate fate)
{
	static const int transfers[] = { PEN_AUTO, PEN_AUTO, PEN_CPU_ASYNC_GPU,
					 PEN_CPU_CACHED_GPU };
	struct pen_options options = PEN_OPTIONS_INIT;
	bool on_gpu = strcmp(pen_device_name(device), "host") != 0;

	options.memory_limit = LIMIT;
	if (on_gpu)
		options.transfer = transfers[chance(loader, COUNT(transfers))];
	if (on_gpu && chance(loader, 3) == 0)
		options.stream = chance(loader, 2) ? PEN_STREAM_LEGACY : PEN_STREAM_PER_THREAD;
	if (fate == FAILS)
		options.inject = "fail:2+:ENODEV";
	if (fate == REFUSED_AT_START)
		options.request_size = 12345;
	return options;
}

static const char *source(struct loader *loader, enum fate fate)
{
	static const char *const names[] = { path, "pattern:16M", "pattern:16M,latency=200us" };

	if (fate == WRITES)
		return "pattern:16M";
	/* Slow enough to be cancelled on its way. */
	return fate == CANCELLED ? "pattern:16M,rate=80M" : names[chance(loader, COUNT(names))];
}

static bool right_bytes(struct loader *loader)
{
	return !pen_device_get(device, loader->copy, loader->memory, SIZE, &loader->err) &&
	       pattern_check(loader->copy, SIZE, 0) == SIZE;
}

static bool spoil(struct loader *loader)
{
	memset(loader->copy, 0x5a, SIZE);
	return !pen_device_put(device, loader->memory, loader->copy, SIZE, &loader->err);
}

/* One job from its start to its end. */
static void run_job(struct loader *loader, enum fate fate, struct pen_object *object)
{
	enum pen_mode mode = fate == WRITES ? PEN_WRITE : PEN_READ;
	struct pen_extent all = { .object = object, .memory = loader->memory, .length = SIZE };
	struct pen_options options = options_for(loader, fate);
	struct pen_report report = PEN_REPORT_INIT;
	struct pen_job *job;
	int rc = pen_job_start(mode, device, &all, 1, &options, &job, &loader->err);

	if (rc) {
		if (fate != REFUSED_AT_START || rc != -EINVAL)
			wrong(loader, fate, "it was refused");
		return;
	}
	if (fate == CANCELLED) {
		os_sleep(chance(loader, 5000000));
		pen_job_cancel(job);
	}
	rc = pen_job_wait(job, &report, &loader->err);
	if (report.pinned_bytes > LIMIT)
		wrong(loader, fate, "it held more memory than promised");
	if (fate == CANCELLED ? rc != -ECANCELED : fate == FAILS ? rc != -ENODEV : rc != 0)
		wrong(loader, fate, "it ended otherwise");
	if (!rc && fate == RUNS && !right_bytes(loader))
		wrong(loader, fate, "wrong bytes");
}

static void load_once(struct loader *loader, enum fate fate)
{
	enum pen_mode mode = fate == WRITES ? PEN_WRITE : PEN_READ;
	struct pen_object *object;

	if (fate == WRITES)
		pattern_fill(loader->copy, SIZE, 0);
	if (fate == WRITES ? pen_device_put(device, loader->memory, loader->copy, SIZE,
					    &loader->err) != 0 : !spoil(loader))
		wrong(loader, fate, "memory cannot be written");
	if (pen_object_open(source(loader, fate), mode, 16 * MIB, &object, &loader->err)) {
		wrong(loader, fate, "the object cannot be opened");
		return;
	}
	run_job(loader, fate, object);
	pen_object_close(object);
	done[fate]++;
}

static void *load(void *argument)
{
	struct loader *loader = argument;
	struct pen_device *again;

	for (int i = 0; i < JOBS; i++) {
		load_once(loader, chance(loader, 3) ? RUNS : chance(loader, FATES));
		if (chance(loader, 10) == 0)
			pen_trim();
		/* The same device, found by its name. */
		if (pen_device_open(pen_device_name(device), &again, &loader->err) ||
		    again != device)
			wrong(loader, RUNS, "another device");
		pen_device_close(again);
	}
	return NULL;
}

static void load_from_all_threads(const char *name)
{
	struct loader loaders[THREADS];
	unsigned int descriptors;

	kit_at("%s", name);
	device = kit_device(name);
	if (!device)
		SKIP("there is no GPU, not even a fake one");
	snprintf(path, sizeof(path), "%s/file", kit_folder(DISK));
	kit_pattern(path, SIZE);
	descriptors = kit_descriptors();
	for (unsigned int i = 0; i < THREADS; i++) {
		struct loader *loader = &loaders[i];

		*loader = (struct loader){ .index = i, .seed = i * 77 + 1 };
		loader->copy = malloc(SIZE);
		CHECK(loader->copy != NULL);
		OK(pen_device_alloc(device, SIZE, &loader->memory, &kit_err));
	}
	for (unsigned int i = 0; i < THREADS; i++)
		CHECK(!pthread_create(&loaders[i].thread, NULL, load, &loaders[i]));
	for (unsigned int i = 0; i < THREADS; i++)
		CHECK(!pthread_join(loaders[i].thread, NULL));
	for (unsigned int i = 0; i < THREADS; i++) {
		OK(pen_device_free(device, loaders[i].memory, SIZE, &kit_err));
		free(loaders[i].copy);
	}
	CHECK_EQ(unexpected, 0);
	for (int fate = 0; fate < FATES; fate++) {
		printf("fate %d: %u jobs\n", fate, done[fate]);
		CHECK(done[fate] > 0);
	}
	CHECK_EQ(kit_descriptors(), descriptors);
	pen_device_close(device);
	pen_trim();
	CHECK_EQ(kit_leaks(), 0);
}

TEST(loads_from_several_threads_to_the_host)
{
	load_from_all_threads("host");
}

TEST(loads_from_several_threads_to_a_gpu)
{
	load_from_all_threads("cuda:0");
}

/* Each thread opens and closes the device around its job: the last one out shuts it down while the
 * next one in starts it. */
static void *come_and_go(void *argument)
{
	struct loader *loader = argument;

	for (int i = 0; i < JOBS; i++) {
		struct pen_extent all = { .length = 2 * MIB };
		struct pen_options options = PEN_OPTIONS_INIT;
		struct pen_device *mine;

		options.allocate = all.length;
		options.allocated = &loader->memory;
		if (pen_device_open("cuda:0", &mine, &loader->err) ||
		    pen_object_open("pattern:2M", PEN_READ, 0, &all.object, &loader->err) ||
		    pen_transfer(PEN_READ, mine, &all, 1, &options, NULL, &loader->err) ||
		    pen_device_get(mine, loader->copy, loader->memory, all.length, &loader->err) ||
		    pen_device_free(mine, loader->memory, all.length, &loader->err)) {
			wrong(loader, RUNS, "it failed");
			return NULL;
		}
		if (pattern_check(loader->copy, all.length, 0) != all.length)
			wrong(loader, RUNS, "wrong bytes");
		pen_object_close(all.object);
		pen_device_close(mine);
	}
	return NULL;
}

TEST(threads_that_open_and_close_the_device_themselves)
{
	struct loader loaders[4];

	device = kit_device("cuda:0");
	if (!device)
		SKIP("there is no GPU, not even a fake one");
	pen_device_close(device);
	for (unsigned int i = 0; i < COUNT(loaders); i++) {
		loaders[i] = (struct loader){ .index = i, .seed = i };
		loaders[i].copy = malloc(2 * MIB);
		CHECK(loaders[i].copy != NULL);
		CHECK(!pthread_create(&loaders[i].thread, NULL, come_and_go, &loaders[i]));
	}
	for (unsigned int i = 0; i < COUNT(loaders); i++) {
		CHECK(!pthread_join(loaders[i].thread, NULL));
		free(loaders[i].copy);
	}
	CHECK_EQ(unexpected, 0);
	CHECK_EQ(kit_leaks(), 0);
}

TEST_MAIN
