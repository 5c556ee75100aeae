/* SPDX-License-Identifier: MIT */
/*
 * Children of fork(): a process that used Penstock forks, as Python's multiprocessing and torch's
 * data loaders do. Whatever the parent's threads were at, transfers to the host work in the child;
 * the GPU does not, for the driver cannot be used there, and the child is told so in words - the
 * fake driver counts its calls, and a child makes none. The parent goes on as if nothing were.
 */
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include "base/pattern.h"
#include "engine/tuner.h"
#include "fake_gpu.h"
#include "io/queue.h"
#include "mem/device.h"
#include "mem/pool.h"
#include "penstock.h"
#include "scratch.h"
#include "sys/cuda.h"
#include "sys/cufile.h"
#include "sys/fault.h"
#include "sys/os.h"

#define MIB ((uint64_t)1 << 20)
#define SIZE (6 * MIB)
#define CHILD_SECONDS 30

static struct pen_error err;
static struct pen_device *host, *gpu;
static unsigned char bytes[SIZE];

/* Run it in a child; true if it came to its end. One that hangs is killed and says so. */
static bool in_child(void (*run)(void))
{
	int status = -1;
	pid_t pid;

	fflush(NULL);
	pid = fork();
	if (!pid) {
		alarm(CHILD_SECONDS);
		run();
		exit(0);
	}
	CHECK(pid > 0 && waitpid(pid, &status, 0) == pid);
	if (WIFSIGNALED(status))
		fprintf(stderr, "the child was killed by signal %d%s\n", WTERMSIG(status),
			WTERMSIG(status) == SIGALRM ? " (it hung)" : "");
	return WIFEXITED(status) && !WEXITSTATUS(status);
}

static int move(enum pen_mode direction, struct pen_device *device, void *memory,
		struct pen_error *words)
{
	struct pen_extent all = { .memory = memory, .length = SIZE };
	int rc;

	CHECK_EQ(pen_object_open("pattern:6M", direction, SIZE, &all.object, words), 0);
	rc = pen_transfer(direction, device, &all, 1, NULL, NULL, words);
	pen_object_close(all.object);
	return rc;
}

static void check_host(struct pen_device *device)
{
	void *memory;

	CHECK_EQ(pen_device_alloc(device, SIZE, &memory, &err), 0);
	CHECK_EQ(move(PEN_READ, device, memory, &err), 0);
	CHECK_EQ(pattern_check(memory, SIZE, 0), SIZE);
	CHECK_EQ(move(PEN_WRITE, device, memory, &err), 0);
	CHECK_EQ(pen_device_free(device, memory, SIZE, &err), 0);
}

static void check_gpu(struct pen_device *device)
{
	void *memory;

	CHECK_EQ(pen_device_alloc(device, SIZE, &memory, &err), 0);
	CHECK_EQ(move(PEN_READ, device, memory, &err), 0);
	CHECK_EQ(pen_device_get(device, bytes, memory, SIZE, &err), 0);
	CHECK_EQ(pattern_check(bytes, SIZE, 0), SIZE);
	CHECK_EQ(move(PEN_WRITE, device, memory, &err), 0);
	CHECK_EQ(pen_device_free(device, memory, SIZE, &err), 0);
}

static void check_refused(int rc)
{
	CHECK_EQ(rc, -ENODEV);
	CHECK_EQ(err.code, -ENODEV);
	CHECK(strstr(err.message, "CUDA was started before this process was forked"));
	CHECK(strstr(err.hint, "spawn"));
}

/* Calls of the driver so far, by this process and those it was forked from. */
static int driver_calls(void)
{
	void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
	int (*count)(const char *) = NULL;

	CHECK(library != NULL);
	*(void **)&count = dlsym(library, "fake_cuda_calls");
	CHECK(count != NULL);
	dlclose(library);
	return count(NULL);
}

/* -------------------------------------------------------------------------------- the host -- */

static void use_host(void)
{
	struct pen_device *again;

	check_host(host);
	CHECK_EQ(pen_device_open("host", &again, &err), 0);
	CHECK(again == host);
	pen_device_close(again);
	pen_device_close(host);
	pen_trim();
}

static void use_host_in_a_grandchild(void)
{
	check_host(host);
	CHECK(in_child(use_host));
	use_host();
}

TEST(the_host_works_in_children_and_theirs)
{
	CHECK_EQ(pen_device_open("host", &host, &err), 0);
	CHECK(in_child(use_host));
	check_host(host);
	CHECK(in_child(use_host_in_a_grandchild));
	check_host(host);
	pen_device_close(host);
}

/* The pool of the parent is not the child's, whose own starts empty. */
static struct piece *shared;

static void look_at_the_pool(void)
{
	struct piece_budget budget = { .left = 1, .piece_size = PIECE_SIZE };
	unsigned char present;
	struct piece *piece;
	int rc;

	/* Not even mapped. */
	CHECK(mincore(shared->memory, 4096, &present) < 0 && errno == ENOMEM);
	piece = piece_take(&budget, PIECE_MORE, host, &rc, &err);
	CHECK(piece && piece->memory[99] == 0);
	memset(piece->memory, 3, PIECE_SIZE);
	piece_put(&budget, piece);
	pen_trim();
}

TEST(staging_memory_is_not_inherited)
{
	struct piece_budget budget = { .left = 2, .piece_size = PIECE_SIZE };
	struct piece *pooled;
	int rc;

	CHECK_EQ(pen_device_open("host", &host, &err), 0);
	shared = piece_take(&budget, PIECE_MORE, host, &rc, &err);
	pooled = piece_take(&budget, PIECE_MORE, host, &rc, &err);
	CHECK(shared && pooled);
	memset(shared->memory, 7, PIECE_SIZE);
	memset(pooled->memory, 8, PIECE_SIZE);
	piece_put(&budget, pooled);
	CHECK(in_child(look_at_the_pool));
	CHECK_EQ(shared->memory[99], 7);
	pooled = piece_take(&budget, PIECE_MORE, host, &rc, &err);
	CHECK_EQ(pooled->memory[99], 8);
	piece_put(&budget, pooled);
	piece_put(&budget, shared);
	pen_trim();
	pen_device_close(host);
}

/* --------------------------------------------------------------------------------- the GPU -- */

static void *gpu_memory;

/* All that an inherited GPU can be asked, and all that it can be given back. */
static void use_inherited_gpu(void)
{
	int before = driver_calls();
	struct pen_options options = PEN_OPTIONS_INIT;
	struct pen_extent all = { .memory = gpu_memory, .length = SIZE };
	struct pen_device *again;
	struct pen_job *job;
	void *memory;

	check_refused(pen_device_ready(gpu, &err));
	check_refused(pen_device_open("cuda:0", &again, &err));
	check_refused(pen_device_open("cuda:1", &again, &err));
	check_refused(pen_device_alloc(gpu, 100, &memory, &err));
	check_refused(pen_device_get(gpu, bytes, gpu_memory, 10, &err));
	check_refused(pen_device_put(gpu, gpu_memory, bytes, 10, &err));
	check_refused(move(PEN_READ, gpu, gpu_memory, &err));
	check_refused(move(PEN_WRITE, gpu, gpu_memory, &err));
	for (int type = PEN_GPU_DIRECT; type <= PEN_MAPPED; type++) {
		options.transfer = type;
		CHECK_EQ(pen_object_open(in_scratch("file"), PEN_READ, 0, &all.object, &err), 0);
		/* Refused at once or by its lanes; CPU_ONLY is refused for a GPU anyway. */
		if (!pen_job_start(PEN_READ, gpu, &all, 1, &options, &job, &err))
			pen_job_wait(job, NULL, &err);
		if (type != PEN_CPU_ONLY)
			check_refused(err.code);
		pen_object_close(all.object);
	}
	CHECK_EQ(pen_device_free(gpu, gpu_memory, SIZE, &err), 0);
	pen_device_close(gpu);
	pen_trim();
	check_host(host);
	CHECK_EQ(driver_calls(), before);
}

static void use_inherited_gpu_in_a_grandchild(void)
{
	CHECK(in_child(use_inherited_gpu));
	use_inherited_gpu();
}

TEST(an_inherited_gpu_is_refused_in_words)
{
	NEED_FAKE_GPU();
	make_file("file", SIZE);
	CHECK_EQ(pen_device_open("host", &host, &err), 0);
	CHECK_EQ(pen_device_open("cuda:0", &gpu, &err), 0);
	CHECK_EQ(pen_device_alloc(gpu, SIZE, &gpu_memory, &err), 0);
	check_gpu(gpu);
	CHECK(in_child(use_inherited_gpu));
	CHECK(in_child(use_inherited_gpu_in_a_grandchild));
	/* Their exits and what they gave back are nothing to us. */
	check_gpu(gpu);
	CHECK_EQ(pen_device_free(gpu, gpu_memory, SIZE, &err), 0);
	pen_device_close(gpu);
	CHECK(!fake_gpu_out(NULL, 0));
	/* That it is closed by now does not help a child. */
	CHECK_EQ(pen_device_open("cuda:0", &gpu, &err), 0);
	CHECK(in_child(use_inherited_gpu));
	pen_device_close(gpu);
	pen_device_close(host);
}

/* The child is forked while the driver is kept in the middle of its start. */
TEST(a_child_does_not_wait_for_a_start_that_happens_elsewhere)
{
	NEED_FAKE_GPU();
	make_file("file", SIZE);
	CHECK_EQ(pen_device_open("host", &host, &err), 0);
	fake_gpu_hold_start();
	CHECK_EQ(pen_device_open("cuda:0", &gpu, &err), 0);
	fake_gpu_await_start();
	gpu_memory = &err;	/* any address: nothing gets there */
	/* As on a machine with several nodes, where the driver has to tell which. */
	gpu->node = NODE_PENDING;
	CHECK(in_child(use_inherited_gpu));
	CHECK_EQ(device_node(gpu), NODE_PENDING);
	fake_gpu_let_start();
	CHECK_EQ(pen_device_ready(gpu, &err), 0);
	gpu->node = -1;
	check_gpu(gpu);
	pen_device_close(gpu);
	pen_device_close(host);
}

static void use_gpu(void)
{
	CHECK_EQ(pen_device_open("cuda:0", &gpu, &err), 0);
	check_gpu(gpu);
	pen_device_close(gpu);
	CHECK(!fake_gpu_out(NULL, 0));
}

TEST(a_child_forked_before_the_first_use_has_the_gpu)
{
	NEED_FAKE_GPU();
	CHECK_EQ(pen_device_open("host", &host, &err), 0);
	check_host(host);
	CHECK(in_child(use_gpu));
	/* Opening the library is not starting the driver. */
	CHECK(cuda_open(&err) != NULL);
	CHECK(in_child(use_gpu));
	use_gpu();
	pen_device_close(host);
}

/* Torch started CUDA, and Penstock hears of it only from the driver. */
static void meet_a_driver_started_by_others(void)
{
	CHECK_EQ(pen_device_open("cuda:0", &gpu, &err), 0);
	check_refused(pen_device_ready(gpu, &err));
	gpu_memory = &err;
	check_refused(move(PEN_READ, gpu, gpu_memory, &err));
	pen_device_close(gpu);
}

TEST(a_driver_that_others_started_is_refused_in_the_same_words)
{
	NEED_FAKE_GPU();
	CHECK(cuda_open(&err) != NULL);
	CHECK_EQ(cuda_open(&err)->cuInit(0), CUDA_OK);
	CHECK(in_child(meet_a_driver_started_by_others));
}

/* Of cuFile too only the parent makes use. */
static void use_no_cufile(void)
{
	CHECK_EQ(cufile_open(&err), -ENODEV);
	CHECK(strstr(err.message, "forked") && strstr(err.hint, "spawn"));
	cufile_trim();
}

TEST(cufile_is_refused_in_words)
{
	NEED_FAKE_GPU();
	CHECK_EQ(pen_device_open("cuda:0", &gpu, &err), 0);
	CHECK_EQ(pen_device_ready(gpu, &err), 0);
	CHECK_EQ(device_enter(gpu, &err), 0);
	if (cufile_open(&err))
		SKIP("there is no libcufile, not even a fake one");
	CHECK(in_child(use_no_cufile));
	cufile_close();
	CHECK(in_child(use_no_cufile));
	cufile_trim();
	CHECK(in_child(use_no_cufile));
	CHECK_EQ(cufile_open(&err), 0);
	cufile_close();
	cufile_trim();
	pen_device_close(gpu);
}

/* ------------------------------------------------------------------ a parent that is busy -- */

#define NEED_PLAIN_BUILD()                                                                     \
	do {                                                                                   \
		if (TEST_SLOW_BUILD)                                                           \
			SKIP("a sanitizer's locks do not survive the fork of a busy process"); \
	} while (0)

static atomic_bool stop;

/* Jobs on the host and the GPU, by several threads: pool, tuner memory, registry, probes. */
static void *churn(void *name)
{
	struct pen_error words;
	void *memory;

	while (!stop) {
		struct pen_device *device;

		CHECK_EQ(pen_device_open(name, &device, &words), 0);
		CHECK_EQ(pen_device_alloc(device, SIZE, &memory, &words), 0);
		CHECK_EQ(move(PEN_READ, device, memory, &words), 0);
		CHECK_EQ(pen_device_free(device, memory, SIZE, &words), 0);
		pen_device_close(device);
	}
	return NULL;
}

static void *trim(void *unused)
{
	struct tuner tuner;

	while (!stop) {
		pen_trim();
		tuner_init(&tuner, "store", false, (struct tuner_setting){ 0 },
			   (struct tuner_limits){ .size_max = 1 << 20, .depth_max = 8,
						  .bytes_max = MIB });
		tuner_forget();
		if (!cufile_open(NULL))
			cufile_close();
	}
	return unused;
}

static void use_what_there_is(void)
{
	struct pen_device *device;

	CHECK_EQ(pen_device_open("host", &device, &err), 0);
	check_host(device);
	pen_device_close(device);
	if (gpu) {
		check_refused(pen_device_open("cuda:0", &device, &err));
		check_refused(pen_device_ready(gpu, &err));
		pen_device_close(gpu);
	}
	pen_trim();
	/* Exit handlers are the business of the last case's end; here they would only be slow. */
	_exit(0);
}

static void fork_in_the_middle(const char *const *names, int count)
{
	pthread_t threads[6];

	for (int i = 0; i < count; i++)
		CHECK(!pthread_create(&threads[i], NULL, churn, (void *)names[i]));
	CHECK(!pthread_create(&threads[count], NULL, trim, NULL));
	for (int i = 0; i < 60; i++) {
		os_sleep(1000000 + (uint64_t)i * 7919 % 3000000);
		CHECK(in_child(use_what_there_is));
	}
	stop = true;
	for (int i = 0; i <= count; i++)
		pthread_join(threads[i], NULL);
	pen_trim();
}

TEST(children_of_a_busy_parent_work)
{
	static const char *const names[] = { "host", "host", "host", "host" };

	NEED_PLAIN_BUILD();
	fork_in_the_middle(names, 4);
}

TEST(children_of_a_parent_busy_with_a_gpu_work)
{
	static const char *const names[] = { "cuda:0", "host", "cuda:0", "cuda:0" };

	NEED_PLAIN_BUILD();
	NEED_FAKE_GPU();
	CHECK_EQ(pen_device_open("cuda:0", &gpu, &err), 0);
	CHECK_EQ(pen_device_ready(gpu, &err), 0);
	fork_in_the_middle(names, 4);
	pen_device_close(gpu);
	CHECK(!fake_gpu_out(NULL, 0));
}

/* Fences of threads that open and close them all the time, so that their list is often locked. */
static struct device_fence held;

static void *fences(void *unused)
{
	struct pen_error words;
	struct device_fence fence;

	while (!stop) {
		CHECK_EQ(device_fence_behind(gpu, NULL, &fence, &words), 0);
		device_fence_close(gpu, &fence);
	}
	return unused;
}

static void close_an_inherited_fence(void)
{
	device_fence_close(gpu, &held);
	CHECK(!held.handle);
	_exit(0);
}

TEST_SLOW(a_child_closes_a_fence_of_a_busy_parent)
{
	pthread_t threads[4];

	NEED_PLAIN_BUILD();
	NEED_FAKE_GPU();
	CHECK_EQ(pen_device_open("cuda:0", &gpu, &err), 0);
	CHECK_EQ(device_fence_behind(gpu, NULL, &held, &err), 0);
	for (int i = 0; i < 4; i++)
		CHECK(!pthread_create(&threads[i], NULL, fences, NULL));
	for (int i = 0; i < 300; i++)
		CHECK(in_child(close_an_inherited_fence));
	stop = true;
	for (int i = 0; i < 4; i++)
		pthread_join(threads[i], NULL);
	device_fence_close(gpu, &held);
	pen_device_close(gpu);
	CHECK(!fake_gpu_out(NULL, 0));
}

/* Pages that the child had too would be copied by the parent's next write, and the GPU would go on
 * writing to those that it knows: nobody would hear of a damaged chunk again. */
static void look_for_the_verdict(void)
{
	uintptr_t page = (uintptr_t)held.verdict / 4096 * 4096;
	unsigned char present;

	CHECK(mincore((void *)page, 4096, &present) < 0 && errno == ENOMEM);
	_exit(0);
}

TEST(verdicts_of_a_gpu_are_not_inherited)
{
	static uint16_t values[100];
	static _Alignas(4096) unsigned char stored[PLANES_ROOM];
	struct planes_chunk chunk;
	uint64_t offset = 0;
	struct coding coding = { .kind = PLANES_BF16, .chunks = &chunk, .offsets = &offset,
				 .values = 100, .length = 100, .rows = 1, .pitch = 100 };
	struct coding_part part = { .coding = &coding, .count = 1, .stored = stored };
	struct device_stream stream;
	void *memory;

	NEED_FAKE_GPU();
	planes_encode(PLANES_BF16, values, 100, stored, &chunk);
	CHECK_EQ(pen_device_open("cuda:0", &gpu, &err), 0);
	CHECK_EQ(pen_device_alloc(gpu, sizeof(values), &memory, &err), 0);
	part.memory = memory;
	CHECK_EQ(device_enter(gpu, &err), 0);
	CHECK_EQ(device_pin(gpu, stored, sizeof(stored), false, &err), 0);
	CHECK_EQ(device_stream_open(gpu, &stream, &err), 0);
	CHECK_EQ(device_fence_open(gpu, &held, &err), 0);
	CHECK_EQ(device_decode(gpu, &stream, &part, 0, &held, &err), 0);
	CHECK(held.verdict);
	CHECK(in_child(look_for_the_verdict));
	device_stream_close(gpu, &stream);
	device_fence_close(gpu, &held);
	CHECK_EQ(device_unpin(gpu, stored, &err), 0);
	CHECK_EQ(pen_device_free(gpu, memory, sizeof(values), &err), 0);
	pen_device_close(gpu);
	CHECK(!fake_gpu_out(NULL, 0));
}

/*
 * The real driver forks a helper while it starts. Our handlers must not stand in its way: nobody
 * may wait for the driver with a lock that they want. Seen by the time that a fork takes.
 */
static void *fork_late(void *took)
{
	uint64_t begin;

	os_sleep(100000000);
	begin = os_now();
	CHECK(in_child(use_what_there_is));
	*(uint64_t *)took = os_now() - begin;
	return NULL;
}

TEST_ALONE(a_fork_does_not_wait_for_a_device_that_is_starting)
{
	uint64_t took = 0, begin = os_now();
	pthread_t thread;

	NEED_FAKE_GPU();
	setenv("FAKE_CUDA_INIT_MS", "3000", 1);
	CHECK_EQ(pen_device_open("cuda:0", &gpu, &err), 0);
	CHECK(!pthread_create(&thread, NULL, fork_late, &took));
	/* Waits for the driver; the other thread must not wait with it. */
	pen_device_close(gpu);
	CHECK(os_now() - begin >= 3000000000ull);
	pthread_join(thread, NULL);
	CHECK(took < 2000000000ull);
	CHECK(!fake_gpu_out(NULL, 0));
}

/*
 * Each lock once for certain: a thread is kept inside it, by a fault hook that fails nothing and
 * only takes its time, and meanwhile the process forks.
 */
static const char *slow_call;
static atomic_bool inside;

static int take_time(const char *name)
{
	if (slow_call && !strcmp(name, slow_call) && !atomic_exchange(&inside, true))
		os_sleep(400000000);
	return 0;
}

static void *open_and_close(void *name)
{
	struct pen_device *device;

	CHECK_EQ(pen_device_open(name, &device, NULL), 0);
	pen_device_close(device);
	return NULL;
}

static void *probe_uring(void *unused)
{
	queue_uring_probe(NULL);
	return unused;
}

static void *open_cufile(void *unused)
{
	if (!cufile_open(NULL))
		cufile_close();
	return unused;
}

static void *trim_pool(void *unused)
{
	pen_trim();
	return unused;
}

static void use_all_locks(void)
{
	struct pen_device *device;

	sys_fault_hook = NULL;
	CHECK_EQ(pen_device_open("host", &device, &err), 0);
	check_host(device);
	queue_uring_probe(NULL);
	if (!cufile_open(NULL))
		cufile_close();
	tuner_forget();
	pen_trim();
	pen_device_close(device);
	_exit(0);
}

static void fork_with(const char *call, void *(*run)(void *), const char *argument)
{
	pthread_t thread;

	slow_call = call;
	inside = false;
	sys_fault_hook = take_time;
	CHECK(!pthread_create(&thread, NULL, run, (void *)argument));
	while (!inside)
		os_sleep(1000000);
	CHECK(in_child(use_all_locks));
	pthread_join(thread, NULL);
	sys_fault_hook = NULL;
}

TEST(a_lock_that_another_thread_holds_is_free_in_the_child)
{
	struct piece_budget budget = { .left = 1, .piece_size = PIECE_SIZE };
	struct piece *piece;
	int rc;

	fork_with("malloc", open_and_close, "host");
	fork_with("io_uring_setup", probe_uring, NULL);
	NEED_FAKE_GPU();
	CHECK_EQ(pen_device_open("cuda:0", &gpu, &err), 0);
	CHECK_EQ(pen_device_ready(gpu, &err), 0);
	CHECK_EQ(device_enter(gpu, &err), 0);
	piece = piece_take(&budget, PIECE_MORE, gpu, &rc, &err);
	CHECK(piece && !piece_pin(piece, &err));
	piece_put(&budget, piece);
	fork_with("cuMemHostUnregister", trim_pool, NULL);
	fork_with("dlopen libcufile", open_cufile, NULL);
	pen_trim();
	fork_with("cuFileDriverOpen", open_cufile, NULL);
	pen_trim();
	pen_device_close(gpu);
	CHECK(!fake_gpu_out(NULL, 0));
}

/* ------------------------------------------------------------------- a job of the parent's -- */

static struct pen_job *job;

static void wait_for_the_parents_job(void)
{
	struct pen_progress progress;
	struct pen_report report = PEN_REPORT_INIT;

	pen_job_poll(job, &progress);
	CHECK_EQ(progress.state, PEN_FAILED);
	pen_job_cancel(job);
	CHECK_EQ(pen_job_wait_for(job, 5), 0);
	CHECK_EQ(pen_job_eventfd(job, &err), -ECHILD);
	CHECK(strstr(err.message, "forked") && err.hint[0]);
	CHECK_EQ(pen_job_wait(job, &report, &err), -ECHILD);
	CHECK(strstr(err.message, "forked") && err.hint[0]);
	check_host(host);
	/* It holds what only the parent can let go. */
	_exit(0);
}

static struct pen_object *unfinished;

static void close_unfinished(void)
{
	pen_object_close(unfinished);
}

TEST(a_child_that_closes_a_new_file_leaves_it_to_its_parent)
{
	struct pen_extent all = { .memory = bytes, .length = SIZE };

	CHECK_EQ(pen_device_open("host", &host, &err), 0);
	pattern_fill(bytes, SIZE, 0);
	CHECK_EQ(pen_object_open(in_scratch("new"), PEN_WRITE_IN_PLACE, SIZE, &unfinished, &err),
		 0);
	all.object = unfinished;
	CHECK(in_child(close_unfinished));
	CHECK_EQ(pen_transfer(PEN_WRITE_IN_PLACE, host, &all, 1, NULL, NULL, &err), 0);
	CHECK_EQ(pen_object_commit(unfinished, &err), 0);
	pen_object_close(unfinished);
	CHECK_EQ(access(in_scratch("new"), F_OK), 0);
	pen_device_close(host);
}

TEST(a_job_stays_with_the_process_that_started_it)
{
	struct pen_extent all = { .memory = bytes, .length = SIZE };

	CHECK_EQ(pen_device_open("host", &host, &err), 0);
	CHECK_EQ(pen_object_open("pattern:6M,rate=20M", PEN_READ, 0, &all.object, &err), 0);
	CHECK_EQ(pen_job_start(PEN_READ, host, &all, 1, NULL, &job, &err), 0);
	os_sleep(50000000);
	CHECK(in_child(wait_for_the_parents_job));
	CHECK_EQ(pen_job_wait(job, NULL, &err), 0);
	CHECK_EQ(pattern_check(bytes, SIZE, 0), SIZE);
	pen_object_close(all.object);
	pen_device_close(host);
}

TEST_MAIN
