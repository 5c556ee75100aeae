/* SPDX-License-Identifier: MIT */
/*
 * Devices by name: the host, and a GPU through the fake driver - present, absent, broken, slow to
 * start. A slow start is no loss: the job reads ahead meanwhile.
 */
#include <errno.h>
#include <sys/mman.h>
#include "base/pattern.h"
#include "fake_gpu.h"
#include "mem/device.h"
#include "mem/pool.h"
#include "penstock.h"
#include "sys/cuda.h"
#include "sys/fault.h"
#include "sys/os.h"

#define MIB (1ull << 20)

static struct pen_error err;
static struct pen_device *device;

TEST(names_are_host_and_cuda_n)
{
	static const char *const bad[] = { "", "gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:256",
					   "cuda:0x0", "Host", "host:0", "cuda0", "cuda:1.0" };

	for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
		device = (struct pen_device *)&err;
		CHECK_EQ(pen_device_open(bad[i], &device, &err), -EINVAL);
		CHECK(!device && strstr(err.hint, "cuda:N"));
	}
	CHECK_EQ(pen_device_open("host", &device, NULL), 0);
	CHECK_TEXT(pen_device_name(device), "host");
	CHECK_EQ(pen_device_ready(device, &err), 0);
	pen_device_close(device);
	pen_device_close(NULL);
}

TEST(one_name_is_one_device)
{
	struct pen_device *again;

	CHECK_EQ(pen_device_open("host", &device, &err), 0);
	CHECK_EQ(pen_device_open("host:", &again, &err), 0);
	CHECK(device == again);
	pen_device_close(again);
	CHECK_TEXT(pen_device_name(device), "host");
	pen_device_close(device);
}

TEST(host_memory_is_aligned_and_copied)
{
	unsigned char bytes[100], *memory;

	CHECK_EQ(pen_device_open("host", &device, &err), 0);
	CHECK_EQ(pen_device_alloc(device, MIB, (void **)&memory, &err), 0);
	CHECK_EQ((uintptr_t)memory % (2 * MIB), 0);
	CHECK_EQ(pen_device_free(device, memory, MIB, &err), 0);
	CHECK_EQ(pen_device_alloc(device, 5000, (void **)&memory, &err), 0);
	CHECK_EQ((uintptr_t)memory % 256, 0);
	memset(bytes, 7, sizeof(bytes));
	CHECK_EQ(pen_device_put(device, memory + 1, bytes, sizeof(bytes), &err), 0);
	memset(bytes, 0, sizeof(bytes));
	CHECK_EQ(pen_device_get(device, bytes, memory + 1, sizeof(bytes), &err), 0);
	CHECK(bytes[0] == 7 && bytes[99] == 7 && memory[0] == 0);
	CHECK_EQ(pen_device_get(device, NULL, NULL, 0, &err), 0);
	CHECK_EQ(pen_device_free(device, memory, 5000, &err), 0);
	CHECK_EQ(pen_device_free(device, NULL, 0, &err), 0);
	CHECK_EQ(pen_device_alloc(device, 0, (void **)&memory, &err), 0);
	CHECK(memory != NULL);
	CHECK_EQ(pen_device_free(device, memory, 0, &err), 0);
	pen_device_close(device);
}

static int mappings(void)
{
	FILE *file = fopen("/proc/self/maps", "re");
	int count = 0, c;

	CHECK(file != NULL);
	while ((c = fgetc(file)) != EOF)
		count += c == '\n';
	fclose(file);
	return count;
}

/* A process may have 65530 mappings, and a model more tensors than that. */
TEST(small_host_memory_takes_no_mapping_of_its_own)
{
	static unsigned char *memory[2000];
	int before;

	CHECK_EQ(pen_device_open("host", &device, &err), 0);
	before = mappings();
	for (size_t i = 0; i < 2000; i++) {
		CHECK_EQ(pen_device_alloc(device, 1 + i, (void **)&memory[i], &err), 0);
		CHECK_EQ((uintptr_t)memory[i] % 256, 0);
		for (size_t j = 0; j <= i; j++)
			CHECK_EQ(memory[i][j], 0);
		memset(memory[i], 0xff, 1 + i);
	}
	CHECK(TEST_SLOW_BUILD || mappings() - before < 100);
	/* Freed and had again, it is zero again. */
	for (size_t i = 0; i < 2000; i++)
		CHECK_EQ(pen_device_free(device, memory[i], 1 + i, &err), 0);
	CHECK_EQ(pen_device_alloc(device, 1000, (void **)&memory[0], &err), 0);
	for (size_t j = 0; j < 1000; j++)
		CHECK_EQ(memory[0][j], 0);
	CHECK_EQ(pen_device_free(device, memory[0], 1000, &err), 0);
	/* The last that is small and the first that is not. */
	CHECK_EQ(pen_device_alloc(device, MIB - 1, (void **)&memory[0], &err), 0);
	CHECK_EQ(pen_device_alloc(device, MIB, (void **)&memory[1], &err), 0);
	CHECK_EQ((uintptr_t)memory[0] % os_page_size(), 0);
	memory[0][MIB - 2] = memory[1][MIB - 1] = 1;
	CHECK_EQ(pen_device_free(device, memory[0], MIB - 1, &err), 0);
	CHECK_EQ(pen_device_free(device, memory[1], MIB, &err), 0);
	pen_device_close(device);
}

static int fail_memory(const char *name)
{
	return !strcmp(name, "mmap") || !strcmp(name, "malloc") ? ENOMEM : 0;
}

TEST(host_memory_that_is_there_and_not_to_be_had_names_the_limits)
{
	static const uint64_t sizes[] = { 100, 4 * MIB };
	void *memory;

	CHECK_EQ(pen_device_open("host", &device, &err), 0);
	sys_fault_hook = fail_memory;
	for (size_t i = 0; i < 2; i++) {
		CHECK_EQ(pen_device_alloc(device, sizes[i], &memory, &err), -ENOMEM);
		CHECK(!memory && strstr(err.hint, "vm.max_map_count"));
	}
	sys_fault_hook = NULL;
	CHECK_EQ(pen_device_alloc(device, 1ull << 62, &memory, &err), -ENOMEM);
	CHECK(!strstr(err.hint, "vm.max_map_count"));
	pen_device_close(device);
}

TEST(more_host_memory_than_there_is_is_refused)
{
	void *memory;

	CHECK_EQ(pen_device_open("host", &device, &err), 0);
	CHECK_EQ(pen_device_alloc(device, UINT64_MAX, &memory, &err), -ENOMEM);
	CHECK(!memory && strstr(err.hint, "18446744073709551615"));
	CHECK_EQ(pen_device_alloc(device, 1ull << 62, &memory, &err), -ENOMEM);
	pen_device_close(device);
}

/* The loader looks at LD_LIBRARY_PATH once, so the program starts itself again without it. */
TEST(an_absent_driver_is_reported_at_once_with_advice)
{
	if (!getenv("TEST_WITHOUT_DRIVER")) {
		setenv("TEST_WITHOUT_DRIVER", "1", 1);
		unsetenv("LD_LIBRARY_PATH");
		execl("/proc/self/exe", "test", "an_absent_driver_is_reported_at_once_with_advice",
		      (char *)NULL);
		CHECK(0);
	}
	if (dlopen("libcuda.so.1", RTLD_NOW))
		SKIP("this machine has a real driver");
	CHECK_EQ(pen_device_open("cuda:0", &device, &err), -ENODEV);
	CHECK(!device && strstr(err.message, "libcuda.so.1") && strstr(err.hint, "NVIDIA driver"));
	CHECK_EQ(pen_device_open("cuda:0", &device, NULL), -ENODEV);
	CHECK_EQ(pen_device_open("host", &device, NULL), 0);
	pen_device_close(device);
}

static void check_broken(const char *name, int code, const char *words)
{
	struct pen_report report = PEN_REPORT_INIT;
	struct pen_object *object;
	struct pen_extent all;
	int rc = pen_device_open(name, &device, &err);

	if (!rc) {
		void *memory;

		/* In the background then: told by ready, by alloc and by the first job. */
		rc = pen_device_ready(device, &err);
		CHECK_EQ(pen_device_alloc(device, 100, &memory, NULL), rc);
		CHECK_EQ(pen_object_open("pattern:64M", PEN_READ, 0, &object, NULL), 0);
		all = (struct pen_extent){ .object = object, .memory = (void *)4096,
					   .length = 64 * MIB };
		CHECK_EQ(pen_transfer(PEN_READ, device, &all, 1, NULL, &report, &err), rc);
		CHECK_EQ(report.bytes, 0);
		pen_object_close(object);
		pen_device_close(device);
	}
	CHECK_EQ(rc, code);
	if (!strstr(err.message, words))
		fprintf(stderr, "%s. %s\n", err.message, err.hint);
	CHECK(strstr(err.message, words));
	CHECK(strstr(err.object, name));
	CHECK(!fake_gpu_out(NULL, 0));
}

TEST(a_gpu_that_is_not_there_is_reported)
{
	NEED_FAKE_GPU();
	check_broken("cuda:7", -ENODEV, "has 1 GPU");
	CHECK(err.hint[0]);
}

TEST(a_machine_without_gpus_is_reported)
{
	NEED_FAKE_GPU();
	setenv("FAKE_CUDA_FAIL", "cuInit:1+=100", 1);
	check_broken("cuda:0", -ENODEV, "NO_DEVICE");
	CHECK(strstr(err.hint, "nvidia-smi"));
}

TEST(a_context_that_cannot_be_made_is_reported)
{
	NEED_FAKE_GPU();
	setenv("FAKE_CUDA_FAIL", "cuDevicePrimaryCtxRetain:1+=2", 1);
	check_broken("cuda:0", -ENOMEM, "OUT_OF_MEMORY");
	CHECK_EQ(err.domain, PEN_DOMAIN_CUDA);
	CHECK_EQ(err.raw, 2);
}

TEST(gpu_memory_is_written_read_and_given_back)
{
	unsigned char bytes[100];
	void *memory;

	NEED_FAKE_GPU();
	CHECK_EQ(pen_device_open("cuda", &device, &err), 0);
	CHECK_TEXT(pen_device_name(device), "cuda:0");
	CHECK_EQ(pen_device_alloc(device, 1000, &memory, &err), 0);
	CHECK_EQ((uintptr_t)memory % 256, 0);
	memset(bytes, 9, sizeof(bytes));
	CHECK_EQ(pen_device_put(device, memory, bytes, 100, &err), 0);
	memset(bytes, 0, sizeof(bytes));
	CHECK_EQ(pen_device_get(device, bytes, memory, 100, &err), 0);
	CHECK_EQ(bytes[99], 9);
	CHECK_EQ(pen_device_free(device, memory, 1000, &err), 0);
	CHECK(pen_device_free(device, memory, 1000, &err) < 0);
	CHECK_EQ(err.domain, PEN_DOMAIN_CUDA);
	pen_device_close(device);
	/* That second free was on purpose; the fake wrote it down. */
	_exit(0);
}

TEST(a_gpu_out_of_memory_tells_how_much_there_is)
{
	void *memory;

	NEED_FAKE_GPU();
	setenv("FAKE_CUDA_MEMORY", "16M", 1);
	CHECK_EQ(pen_device_open("cuda:0", &device, &err), 0);
	CHECK_EQ(pen_device_alloc(device, 64 * MIB, &memory, &err), -ENOMEM);
	CHECK(!memory && strstr(err.hint, "67108864") && strstr(err.hint, "16777216"));
	pen_device_close(device);
	CHECK(!fake_gpu_out(NULL, 0));
}

static void enter_gpu(void)
{
	CHECK_EQ(pen_device_open("cuda:0", &device, &err), 0);
	CHECK_EQ(pen_device_ready(device, &err), 0);
	CHECK_EQ(device_enter(device, &err), 0);
}

TEST(pieces_stay_pinned_in_the_pool_until_the_device_closes)
{
	struct piece_budget budget = { .left = 2, .piece_size = PIECE_SIZE };
	struct piece *piece;
	unsigned char *memory;
	int rc;

	NEED_FAKE_GPU();
	enter_gpu();
	piece = piece_take(&budget, PIECE_MORE, device, &rc, &err);
	CHECK(piece != NULL);
	CHECK_EQ(piece_pin(piece, &err), 0);
	CHECK_EQ(piece_pin(piece, &err), 0);
	memory = piece->memory;
	piece_put(&budget, piece);
	CHECK(fake_gpu_has("registrations", 1));
	piece = piece_take(&budget, PIECE_MORE, device, &rc, &err);
	CHECK(piece->memory == memory);
	piece_put(&budget, piece);
	pen_device_close(device);
	CHECK(!fake_gpu_out(NULL, 0));
}

static struct piece *taken[5];

/* Four pieces that were made together, and one that was not. */
static void take_pieces(struct piece_budget *budget)
{
	int rc;

	enter_gpu();
	*budget = (struct piece_budget){ .left = 5, .kept = 4, .together = 4,
					 .piece_size = PIECE_SIZE };
	for (int i = 0; i < 5; i++) {
		/* Not before all have been touched. */
		CHECK(!i || i == 4 || piece_pin(taken[0], &err) == -EAGAIN);
		taken[i] = piece_take(budget, i < 4 ? PIECE_TOGETHER : PIECE_MORE, device, &rc,
				      &err);
		CHECK(taken[i] != NULL);
	}
}

TEST(pieces_made_together_are_pinned_together)
{
	struct piece_budget budget;

	NEED_FAKE_GPU();
	take_pieces(&budget);
	CHECK(fake_gpu_has("registrations", 0));
	for (int i = 0; i < 4; i++) {
		CHECK_EQ(piece_pin(taken[i], &err), 0);
		CHECK(fake_gpu_has("registrations", 1));
	}
	CHECK_EQ(piece_pin(taken[4], &err), 0);
	CHECK(fake_gpu_has("registrations", 2));
	for (int i = 1; i < 5; i++)
		piece_put(&budget, taken[i]);
	/* What is out keeps what was made with it. */
	piece_trim(device);
	CHECK(fake_gpu_has("registrations", 1));
	piece_put(&budget, taken[0]);
	pen_device_close(device);
	CHECK(!fake_gpu_out(NULL, 0));
}

TEST(where_all_at_once_is_refused_each_piece_is_asked_for)
{
	struct piece_budget budget;

	NEED_FAKE_GPU();
	setenv("FAKE_CUDA_FAIL", "cuMemHostRegister_v2:1=1,cuMemHostRegister_v2:3=1", 1);
	take_pieces(&budget);
	CHECK_EQ(piece_pin(taken[0], &err), 0);
	CHECK(fake_gpu_has("registrations", 1));
	CHECK(piece_pin(taken[1], &err) < 0 && err.message[0]);
	CHECK_EQ(piece_pin(taken[2], &err), 0);
	CHECK_EQ(piece_pin(taken[2], &err), 0);
	CHECK(fake_gpu_has("registrations", 2));
	for (int i = 0; i < 5; i++)
		piece_put(&budget, taken[i]);
	/* Nobody wants it as it is; the next job asks anew. */
	CHECK(fake_gpu_has("registrations", 0));
	pen_device_close(device);
	CHECK(!fake_gpu_out(NULL, 0));
}

TEST(pieces_of_a_slab_that_was_given_up_are_pinned_one_by_one)
{
	struct piece_budget budget = { .left = 2, .kept = 3, .together = 3,
				       .piece_size = PIECE_SIZE };
	struct piece *two[2];
	int rc;

	NEED_FAKE_GPU();
	enter_gpu();
	for (int i = 0; i < 2; i++) {
		two[i] = piece_take(&budget, PIECE_TOGETHER, device, &rc, &err);
		CHECK(two[i] && piece_pin(two[i], &err) == -EAGAIN);
	}
	CHECK(!piece_take(&budget, PIECE_TOGETHER, device, &rc, &err) && !rc);
	for (int i = 0; i < 2; i++) {
		CHECK_EQ(piece_pin(two[i], &err), 0);
		CHECK(fake_gpu_has("registrations", (unsigned long)i + 1));
	}
	for (int i = 0; i < 2; i++)
		piece_put(&budget, two[i]);
	CHECK(fake_gpu_has("registrations", 0));
	pen_device_close(device);
	CHECK(!fake_gpu_out(NULL, 0));
}

TEST(what_was_never_pinned_is_not_left_to_a_job_that_may_pin_less)
{
	struct piece_budget budget;
	unsigned char *memory, present;

	NEED_FAKE_GPU();
	take_pieces(&budget);
	memory = taken[0]->memory;
	for (int i = 0; i < 5; i++)
		piece_put(&budget, taken[i]);
	CHECK(mincore(memory, 4096, &present) < 0);
	pen_device_close(device);
	CHECK(!fake_gpu_out(NULL, 0));
}

static void *pin_slowly(void *piece)
{
	struct pen_error why;

	CHECK_EQ(device_enter(device, &why), 0);
	CHECK_EQ(piece_pin(piece, &why), 0);
	return NULL;
}

static atomic_bool pinning;

static int say_pinning(const char *name)
{
	if (!strcmp(name, "cuMemHostRegister_v2")) {
		atomic_store(&pinning, true);
		usleep(200000);
	}
	return 0;
}

TEST(one_lane_pins_for_all_and_nobody_waits_for_it)
{
	struct piece_budget budget;
	pthread_t thread;

	NEED_FAKE_GPU();
	take_pieces(&budget);
	sys_fault_hook = say_pinning;
	CHECK(!pthread_create(&thread, NULL, pin_slowly, taken[0]));
	while (!atomic_load(&pinning))
		usleep(1000);
	CHECK_EQ(piece_pin(taken[1], &err), -EAGAIN);
	pthread_join(thread, NULL);
	sys_fault_hook = NULL;
	CHECK_EQ(piece_pin(taken[1], &err), 0);
	CHECK(fake_gpu_has("registrations", 1));
	for (int i = 0; i < 5; i++)
		piece_put(&budget, taken[i]);
	pen_device_close(device);
	CHECK(!fake_gpu_out(NULL, 0));
}

/*
 * Memory from elsewhere, like torch's, is there before the engine's own context is: played by
 * calls to the driver of our own, made before the engine's slow ones.
 */
static cuda_pointer foreign_memory(size_t size)
{
	const struct cuda_api *api = cuda_open(&err);
	cuda_pointer pointer = 0;
	void *context;

	CHECK(api != NULL);
	CHECK(!api->cuInit(0) && !api->cuDevicePrimaryCtxRetain(&context, 0));
	CHECK(!api->cuCtxSetCurrent(context) && !api->cuMemAlloc_v2(&pointer, size));
	return pointer;
}

TEST_ALONE(a_job_reads_ahead_while_the_device_starts)
{
	struct pen_report report = PEN_REPORT_INIT;
	static unsigned char bytes[64 << 20];
	struct pen_object *object;
	struct pen_extent all;
	cuda_pointer memory;
	uint64_t begin;

	NEED_FAKE_GPU();
	/* The wire needs 0.64 s for these bytes, the engine's context 0.6 s. */
	setenv("FAKE_CUDA_DELAY", "cuDevicePrimaryCtxRetain:2=600", 1);
	memory = foreign_memory(64 * MIB);
	CHECK_EQ(pen_object_open("pattern:64M,rate=100M", PEN_READ, 0, &object, &err), 0);
	begin = os_now();
	CHECK_EQ(pen_device_open("cuda:0", &device, &err), 0);
	CHECK(os_now() - begin < 250000000);
	all = (struct pen_extent){ .object = object, .memory = (void *)(uintptr_t)memory,
				   .length = 64 * MIB };
	CHECK_EQ(pen_transfer(PEN_READ, device, &all, 1, NULL, &report, &err), 0);
	printf("setup %.3f of %.3f s\n", report.setup_seconds, report.seconds);
	CHECK(report.setup_seconds >= 0.5);
	/* However long the context took on a busy machine, the wire's time passed meanwhile. */
	CHECK(report.seconds < report.setup_seconds + 0.64 - 0.1);
	CHECK_EQ(pen_device_get(device, bytes, (void *)(uintptr_t)memory, 64 * MIB, &err), 0);
	CHECK_EQ(pattern_check(bytes, 64 * MIB, 0), 64 * MIB);
	pen_object_close(object);
	CHECK(!cuda_open(NULL)->cuMemFree_v2(memory));
	pen_device_close(device);
	cuda_open(NULL)->cuDevicePrimaryCtxRelease_v2(0);
	CHECK(!fake_gpu_out(NULL, 0));
}

TEST_ALONE(a_slow_driver_delays_what_needs_it_and_nothing_else)
{
	struct pen_report report = PEN_REPORT_INIT;
	struct pen_object *object;
	struct pen_extent all;
	uint64_t begin;
	void *memory;

	NEED_FAKE_GPU();
	setenv("FAKE_CUDA_INIT_MS", "300", 1);
	begin = os_now();
	CHECK_EQ(pen_device_open("cuda:0", &device, &err), 0);
	CHECK(os_now() - begin < 250000000);
	CHECK_EQ(pen_object_open("pattern:8M", PEN_READ, 0, &object, &err), 0);
	CHECK_EQ(pen_device_alloc(device, 8 * MIB, &memory, &err), 0);
	CHECK(os_now() - begin >= 300000000);
	all = (struct pen_extent){ .object = object, .memory = memory, .length = 8 * MIB };
	CHECK_EQ(pen_transfer(PEN_READ, device, &all, 1, NULL, &report, &err), 0);
	CHECK(report.setup_seconds < 0.1);
	CHECK_EQ(pen_device_free(device, memory, 8 * MIB, &err), 0);
	pen_object_close(object);
	pen_device_close(device);
}

TEST(a_device_closed_while_it_starts_is_closed_cleanly)
{
	NEED_FAKE_GPU();
	setenv("FAKE_CUDA_INIT_MS", "50", 1);
	for (int i = 0; i < 3; i++) {
		CHECK_EQ(pen_device_open("cuda:0", &device, &err), 0);
		pen_device_close(device);
	}
	CHECK(!fake_gpu_out(NULL, 0));
}

TEST_MAIN
