/* SPDX-License-Identifier: MIT */
/*
 * Bytes that change their form on their way: a GPU's kernel, or the core that does its work, leaves
 * the very bits of the twin in base/form.c, on random and on awkward numbers, wherever they lie, by
 * every path. Runs on a GPU and on the fake one; what needs the fake's settings says so.
 */
#include <errno.h>
#include <fcntl.h>
#include "base/form.h"
#include "fake_gpu.h"
#include "penstock.h"
#include "sys/cuda.h"
#include "test.h"

#define MIB ((size_t)1 << 20)
#define FILE_SIZE (12 * MIB + 4096)
#define PADDING 64
#define ODD (6 * MIB + 5)	/* shortly before one of the stretches, and after a hole */

static struct pen_error err;
static unsigned char *bytes;	/* of the file */

#define CHECK_PEN(call)                                                        \
	do {                                                                   \
		if (call) {                                                    \
			char test_text[1024];                                  \
			pen_error_format(&err, test_text, sizeof(test_text));  \
			fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, test_text); \
			exit(1);                                               \
		}                                                              \
	} while (0)

/* In the working folder, where a build of another kind may be at the same test. */
static const char *file_name(void)
{
	static char name[32];

	snprintf(name, sizeof(name), "forms-test-%d.bin", (int)getpid());
	return name;
}

static void remove_file(void)
{
	unlink(file_name());
}

/* Every number of 16 bits; the edges of fp32; then random bits. */
static void fill(void)
{
	static const uint32_t edges[] = {
		0, 1, 0x7fffff, 0x800000, 0x33000000, 0x33000001, 0x337fffff, 0x33800000,
		0x387fc000, 0x387fe000, 0x387fffff, 0x38800000, 0x477fe000, 0x477fefff, 0x477ff000,
		0x47800000, 0x7f7f7fff, 0x7f7f8000, 0x7f7fffff, 0x7f800000, 0x7f800001, 0x7fc00000,
		0x7fffffff, 0x3f808000, 0x3f818000, 0x3f801000, 0x3f803000,
	};
	uint64_t seed = 11;
	size_t at = 0;

	for (uint32_t i = 0; i < 0x10000; i++, at += 2)
		memcpy(bytes + at, &(uint16_t){ (uint16_t)i }, 2);
	for (size_t i = 0; i < 2 * sizeof(edges) / 4; i++, at += 4) {
		uint32_t edge = edges[i / 2] | (i % 2 ? 0x80000000u : 0);

		memcpy(bytes + at, &edge, 4);
	}
	for (; at < FILE_SIZE; at += 8) {
		seed = seed * 6364136223846793005ull + 1442695040888963407ull;
		memcpy(bytes + at, &(uint64_t){ seed ^ seed >> 29 }, FILE_SIZE - at < 8
									 ? FILE_SIZE - at : 8);
	}
}

static struct pen_object *open_file(void)
{
	struct pen_object *file;
	int fd = open(file_name(), O_RDWR | O_CREAT | O_TRUNC, 0600);

	CHECK(fd >= 0);
	atexit(remove_file);
	bytes = malloc(FILE_SIZE);
	CHECK(bytes);
	fill();
	CHECK_EQ(write(fd, bytes, FILE_SIZE), FILE_SIZE);
	CHECK_EQ(fdatasync(fd), 0);
	close(fd);
	CHECK_PEN(pen_object_open(file_name(), PEN_READ, 0, &file, &err));
	return file;
}

static struct pen_device *open_device(const char *name)
{
	struct pen_device *device;
	const struct cuda_api *cuda = strcmp(name, "host") ? cuda_open(&err) : NULL;
	int count = 0;

	if (strcmp(name, "host") && !cuda)
		SKIP("there is no NVIDIA driver");
	if (cuda && (cuda->cuInit(0) || cuda->cuDeviceGetCount(&count) || !count))
		SKIP("there is no GPU");
	CHECK_PEN(pen_device_open(name, &device, &err));
	return device;
}

/* What the twin makes of `length` bytes from `offset` on is at `memory`, and nothing beside it. */
static void check_numbers(const struct form *form, uint64_t offset, uint64_t length,
			  const unsigned char *memory)
{
	uint64_t size = form_bytes(form, length);
	unsigned char *expected = malloc(size + 1);

	CHECK(expected);
	form->apply(expected, bytes + offset, length / form->from_size);
	for (uint64_t i = 0; i < size; i++)
		if (memory[i] != expected[i]) {
			fprintf(stderr, "%s: byte %llu of %llu from %llu is %02x, not %02x\n",
				form->kernel, (unsigned long long)i, (unsigned long long)size,
				(unsigned long long)offset, memory[i], expected[i]);
			exit(1);
		}
	free(expected);
}

struct stretch {
	uint64_t offset, length, rows, object_pitch, memory_pitch;
};

/* One job of stretches of one form, with plain bytes between them; each padded in memory. */
static void load(struct pen_device *device, struct pen_object *file, uint64_t number,
		 const struct stretch *stretches, size_t count, struct pen_options options,
		 struct pen_report *report)
{
	const struct form *form = form_of(number);
	struct pen_extent extents[32] = { 0 };
	uint64_t at[16], total = PADDING;
	unsigned char *memory, *back;
	void *there;

	CHECK(count <= 15);
	for (size_t i = 0; i < count; i++) {
		const struct stretch *s = &stretches[i];
		uint64_t pitch = s->rows > 1 ? s->memory_pitch : 0;

		at[i] = total;
		total += form_bytes(form, s->length) + (s->rows ? s->rows - 1 : 0) * pitch;
		total = (total + 2 * PADDING - 1) / PADDING * PADDING;
	}
	CHECK_PEN(pen_device_alloc(device, total + 1, &there, &err));
	back = malloc(total + 1);
	CHECK(back);
	memset(back, 0xee, total + 1);
	CHECK_PEN(pen_device_put(device, there, back, total + 1, &err));
	memory = there;
	for (size_t i = 0; i < count; i++)
		extents[i] = (struct pen_extent){
			.object = file, .offset = stretches[i].offset, .memory = memory + at[i],
			.length = stretches[i].length, .rows = stretches[i].rows,
			.object_pitch = stretches[i].object_pitch,
			.memory_pitch = stretches[i].memory_pitch, .form = number,
		};
	/* A plain one that makes a request begin at an odd place. */
	extents[count] = (struct pen_extent){
		.object = file, .offset = ODD, .memory = memory + total, .length = 1,
	};
	CHECK_PEN(pen_transfer(PEN_READ, device, extents, count + 1, &options, report, &err));
	CHECK_PEN(pen_device_get(device, back, there, total + 1, &err));
	CHECK_EQ(back[total], bytes[ODD]);
	for (size_t i = 0; i < count; i++) {
		const struct stretch *s = &stretches[i];
		uint64_t size = form_bytes(form, s->length);

		for (uint64_t row = 0; row < (s->rows ? s->rows : 1); row++) {
			uint64_t begin = at[i] + row * s->memory_pitch;

			check_numbers(form, s->offset + row * s->object_pitch, s->length,
				      back + begin);
			CHECK_EQ(back[begin - 1], 0xee);
			CHECK_EQ(back[begin + size], 0xee);
		}
	}
	CHECK_PEN(pen_device_free(device, there, total + 1, &err));
	free(back);
}

static const struct stretch stretches[] = {
	{ .offset = 0, .length = 0x20000 + 216 },
	{ .offset = 0x20000 + 220, .length = 4 },
	{ .offset = MIB - 4, .length = 8 },			/* across requests */
	{ .offset = 2 * MIB + 12, .length = 3 * MIB + 300 },
	{ .offset = 8 * MIB, .length = 1000, .rows = 600, .object_pitch = 4096,
	  .memory_pitch = 2404 },
	{ .offset = 11 * MIB + 4, .length = MIB },
	{ .offset = 6 * MIB + 8, .length = 4, .rows = 70000, .object_pitch = 16,
	  .memory_pitch = 12 },
};

#define STRETCHES (sizeof(stretches) / sizeof(stretches[0]))

static bool refused(const struct pen_report *report, const char *path, const char *words)
{
	for (uint32_t i = 0; i < report->refused_count; i++)
		if (!strcmp(report->refused[i].path, path))
			return strstr(report->refused[i].reason, words) != NULL;
	return false;
}

static void check_device(const char *name, const int *types, size_t type_count)
{
	struct pen_object *file = open_file();
	struct pen_device *device = open_device(name);

	for (uint64_t number = 1; number < PEN_FORMS; number++)
		for (size_t t = 0; t < type_count; t++) {
			struct pen_options options = PEN_OPTIONS_INIT;
			struct pen_report report = PEN_REPORT_INIT;

			options.transfer = types[t];
			load(device, file, number, stretches, STRETCHES, options, &report);
			CHECK_EQ(report.delivered_bytes - 1,
				 pen_form_bytes((int)number, report.bytes - 1));
			CHECK(!refused(&report, "kernels", ""));
		}
	pen_object_close(file);
	pen_device_close(device);
	free(bytes);
}

TEST(kernels_leave_the_bits_of_their_twins)
{
	static const int types[] = { PEN_AUTO, PEN_CPU_GPU, PEN_CPU_ASYNC_GPU,
				     PEN_CPU_CACHED_GPU };

	check_device("cuda:0", types, 4);
}

TEST(host_memory_gets_the_bits_of_the_twins)
{
	static const int types[] = { PEN_AUTO, PEN_CPU_ONLY };

	check_device("host", types, 2);
}

/* Neighbours in the file and in memory that become different things. */
static void check_neighbours(const char *name)
{
	static const uint64_t forms[] = { PEN_FORM_BF16_TO_F16, PEN_FORM_F16_TO_BF16,
					  PEN_FORM_PLAIN, PEN_FORM_BF16_TO_F16 };
	struct pen_object *file = open_file();
	struct pen_device *device = open_device(name);
	struct pen_extent extents[4];
	unsigned char back[4 * 1000];
	void *memory;

	CHECK_PEN(pen_device_alloc(device, sizeof(back), &memory, &err));
	for (size_t i = 0; i < 4; i++)
		extents[i] = (struct pen_extent){ .object = file, .offset = 100000 + i * 1000,
						  .memory = (char *)memory + i * 1000,
						  .length = 1000, .form = forms[i] };
	CHECK_PEN(pen_transfer(PEN_READ, device, extents, 4, NULL, NULL, &err));
	CHECK_PEN(pen_device_get(device, back, memory, sizeof(back), &err));
	for (size_t i = 0; i < 4; i++)
		if (forms[i])
			check_numbers(form_of(forms[i]), extents[i].offset, 1000, back + i * 1000);
		else
			CHECK(!memcmp(back + i * 1000, bytes + extents[i].offset, 1000));
	CHECK_PEN(pen_device_free(device, memory, sizeof(back), &err));
	pen_object_close(file);
	pen_device_close(device);
	free(bytes);
}

TEST(neighbours_that_become_different_things_stay_apart_on_a_gpu)
{
	check_neighbours("cuda:0");
}

TEST(neighbours_that_become_different_things_stay_apart_on_the_host)
{
	check_neighbours("host");
}

TEST(small_memory_limits_and_requests_cut_no_number)
{
	struct pen_object *file = open_file();
	struct pen_device *device = open_device("cuda:0");

	for (uint64_t number = 1; number < PEN_FORMS; number++) {
		struct pen_options options = PEN_OPTIONS_INIT;

		options.memory_limit = 64 << 10;
		options.lanes = 1;
		load(device, file, number, stretches, STRETCHES, options, NULL);
		options.memory_limit = 0;
		options.request_size = 4096;
		load(device, file, number, stretches, STRETCHES, options, NULL);
	}
	pen_object_close(file);
	pen_device_close(device);
	free(bytes);
}

/* The fake driver says no in one way or another; a core does the work, and the report says why. */
static void without_kernels(const char *fail, const char *words)
{
	struct pen_options options = PEN_OPTIONS_INIT;
	struct pen_object *file;
	struct pen_device *device;

	NEED_FAKE_GPU();
	setenv("FAKE_CUDA_FAIL", fail, 1);
	/* The core's copies are out of plain memory, which the real driver takes. */
	setenv("FAKE_CUDA_STRICT", "0", 1);
	file = open_file();
	device = open_device("cuda:0");
	for (uint64_t number = 1; number < PEN_FORMS; number++) {
		struct pen_report report = PEN_REPORT_INIT;

		/* Not the last, whose many rows take a copy each. */
		load(device, file, number, stretches, STRETCHES - 1, options, &report);
		if (!refused(&report, "kernels", words)) {
			fprintf(stderr, "no word of %s\n", words);
			exit(1);
		}
	}
	pen_object_close(file);
	pen_device_close(device);
	free(bytes);
}

TEST(where_no_kernel_can_be_loaded_a_core_does_its_work)
{
	without_kernels("cuModuleLoadData:1+=209", "NO_BINARY_FOR_GPU");
}

TEST(where_a_kernel_is_missing_a_core_does_its_work)
{
	without_kernels("cuModuleGetFunction:3=500", "NOT_FOUND");
}

TEST(where_memory_cannot_be_pinned_a_core_does_its_work)
{
	without_kernels("cuMemHostRegister_v2:1+=2", "could not be pinned");
}

TEST(a_kernel_that_fails_ends_the_job_with_words)
{
	struct pen_device *device;
	struct pen_object *file;
	struct pen_extent extent;
	void *memory;

	NEED_FAKE_GPU();
	setenv("FAKE_CUDA_FAIL", "cuLaunchKernel:1=719", 1);
	file = open_file();
	device = open_device("cuda:0");
	CHECK_PEN(pen_device_alloc(device, MIB, &memory, &err));
	extent = (struct pen_extent){ .object = file, .memory = memory, .length = MIB,
				      .form = PEN_FORM_F32_TO_F16 };
	CHECK_EQ(pen_transfer(PEN_READ, device, &extent, 1, NULL, NULL, &err), -EIO);
	CHECK_TEXT(err.operation, "start a kernel on");
	CHECK_PEN(pen_device_free(device, memory, MIB, &err));
	pen_object_close(file);
	pen_device_close(device);
	free(bytes);
}

static int plan(struct pen_object *file, struct pen_device *host, struct pen_extent extent)
{
	extent.object = file;
	return pen_transfer(PEN_READ, host, &extent, 1, NULL, NULL, &err);
}

TEST(a_form_that_would_cut_numbers_in_two_is_refused)
{
	struct pen_device *host = open_device("host");
	struct pen_object *file = open_file();
	static _Alignas(8) unsigned char memory[1024];
	struct pen_extent good = { .memory = memory, .offset = 8, .length = 16, .rows = 2,
				   .object_pitch = 32, .memory_pitch = 32,
				   .form = PEN_FORM_BF16_TO_F32 };
	struct pen_extent bad = good;

	CHECK_PEN(plan(file, host, bad));
	bad.offset = 9;
	CHECK_EQ(plan(file, host, bad), -EINVAL);
	bad = good;
	bad.length = 15;
	CHECK_EQ(plan(file, host, bad), -EINVAL);
	bad = good;
	bad.object_pitch = 33;
	CHECK_EQ(plan(file, host, bad), -EINVAL);
	bad = good;
	bad.memory = memory + 2;
	CHECK_EQ(plan(file, host, bad), -EINVAL);
	bad = good;
	bad.memory_pitch = 30;
	CHECK_EQ(plan(file, host, bad), -EINVAL);
	bad = good;
	bad.memory_pitch = 28;		/* rows take 32 there */
	CHECK_EQ(plan(file, host, bad), -EINVAL);
	bad = good;
	bad.form = PEN_FORMS;
	CHECK_EQ(plan(file, host, bad), -EINVAL);
	CHECK(strstr(err.message, "form that is not known"));
	pen_object_close(file);
	free(bytes);
	pen_device_close(host);
}

TEST(a_write_with_a_form_is_refused)
{
	struct pen_device *host = open_device("host");
	static _Alignas(8) unsigned char memory[64];
	struct pen_extent extent = { .memory = memory, .length = 64,
				     .form = PEN_FORM_F32_TO_BF16 };

	CHECK_PEN(pen_object_open("null:", PEN_WRITE, 0, &extent.object, &err));
	CHECK_EQ(pen_transfer(PEN_WRITE, host, &extent, 1, NULL, NULL, &err), -EINVAL);
	CHECK(strstr(err.message, "that is for reads"));
	pen_object_close(extent.object);
	pen_device_close(host);
}

TEST_MAIN
