/* SPDX-License-Identifier: MIT */
/*
 * One job between one store and any memories: the host's and those of two GPUs, in both
 * directions, with constant bytes between them, each device behind a stream of its own. The
 * second GPU is a fake; where the driver is a real one with a single GPU, a second handle of that
 * stands in for it.
 */
#include "kit.h"
#include "io/object.h"

#define TENSORS 400u
#define MOST (48 * KIB)

struct part {
	struct pen_device *device;
	unsigned char *memory;
	uint64_t offset, length;
};

static struct pen_device *devices[3];	/* host, two GPUs or two handles of one */
static struct part parts[TENSORS];
static struct pen_extent extents[2 * TENSORS + 2];
static size_t extent_count;
static uint64_t end;
static unsigned char bytes[MOST], wanted[MOST];
static unsigned char header[777];

static void open_devices(void)
{
	devices[0] = kit_device("host");
	devices[1] = kit_device("cuda:0");
	if (!devices[1])
		SKIP("there is no GPU, not even a fake one");
	devices[2] = kit_device("cuda:1");
	if (!devices[2])
		devices[2] = kit_device("cuda:0");
}

static void close_devices(void)
{
	for (unsigned int i = 0; i < TENSORS; i++)
		OK(pen_device_free(parts[i].device, parts[i].memory, parts[i].length, &kit_err));
	pen_trim();
	for (int i = 0; i < 3; i++)
		pen_device_close(devices[i]);
	CHECK_EQ(kit_leaks(), 0);
}

/* Tensors of all sizes, each on a device of its own choice, padded to 64 bytes, behind a header. */
static void lay_out(bool write)
{
	extent_count = 0;
	end = 4096;
	if (write) {
		extents[extent_count++] = (struct pen_extent){
			.memory = header, .length = sizeof(header), .device = devices[0] };
		extents[extent_count++] = (struct pen_extent){
			.offset = sizeof(header), .length = 4096 - sizeof(header),
			.flags = PEN_FILL, .fill = ' ' };
	}
	for (unsigned int i = 0; i < TENSORS; i++) {
		struct part *part = &parts[i];

		part->length = (i * 7919ull) % MOST + 1;
		part->offset = end;
		part->device = devices[i % 3];
		end = (end + part->length + 63) / 64 * 64;
		if (!part->memory)
			OK(pen_device_alloc(part->device, part->length, (void **)&part->memory,
					    &kit_err));
		extents[extent_count++] = (struct pen_extent){
			.offset = part->offset, .memory = part->memory, .length = part->length,
			.device = part->device, .group = i };
		if (write && i + 1 < TENSORS)
			extents[extent_count++] = (struct pen_extent){
				.offset = part->offset + part->length,
				.length = end - part->offset - part->length,
				.flags = PEN_FILL, .fill = 0xaa, .group = i };
	}
	end = parts[TENSORS - 1].offset + parts[TENSORS - 1].length;
}

/* Pattern of its own for each tensor, so that no two can be mistaken for each other. */
static void fill(unsigned int i, unsigned char *to)
{
	pattern_fill(to, parts[i].length, (uint64_t)i << 32);
}

static void check_file(const char *path)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	struct stat st;

	CHECK(fd >= 0 && !fstat(fd, &st));
	CHECK_EQ(st.st_size, end);
	CHECK_EQ(pread(fd, bytes, 4096, 0), 4096);
	CHECK(!memcmp(bytes, header, sizeof(header)));
	for (size_t i = sizeof(header); i < 4096; i++)
		CHECK_EQ(bytes[i], ' ');
	for (unsigned int i = 0; i < TENSORS; i++) {
		uint64_t next = i + 1 < TENSORS ? parts[i + 1].offset : end;
		unsigned char padding[64];

		fill(i, wanted);
		CHECK_EQ(pread(fd, bytes, parts[i].length, (off_t)parts[i].offset),
			 parts[i].length);
		CHECK(!memcmp(bytes, wanted, parts[i].length));
		for (uint64_t at = parts[i].offset + parts[i].length; at < next; at++) {
			CHECK_EQ(pread(fd, padding, 1, (off_t)at), 1);
			CHECK_EQ(padding[0], 0xaa);
		}
	}
	close(fd);
}

static const char *write_all(struct pen_options *options, struct pen_report *report)
{
	static char path[128];
	struct pen_object *object;

	memset(header, 'h', sizeof(header));
	snprintf(path, sizeof(path), "%s/places", kit_folder(DISK));
	lay_out(true);
	for (unsigned int i = 0; i < TENSORS; i++) {
		fill(i, bytes);
		OK(pen_device_put(parts[i].device, parts[i].memory, bytes, parts[i].length,
				  &kit_err));
	}
	OK(pen_object_open(path, PEN_WRITE, end, &object, &kit_err));
	for (size_t i = 0; i < extent_count; i++)
		extents[i].object = object;
	OK(pen_transfer(PEN_WRITE, devices[1], extents, extent_count, options, report, &kit_err));
	OK(pen_object_commit(object, &kit_err));
	pen_object_close(object);
	check_file(path);
	return path;
}

static void read_all(const char *path, struct pen_options *options, struct pen_report *report)
{
	struct pen_object *object;

	lay_out(false);
	memset(bytes, 0xdd, sizeof(bytes));
	for (unsigned int i = 0; i < TENSORS; i++)
		OK(pen_device_put(parts[i].device, parts[i].memory, bytes, parts[i].length,
				  &kit_err));
	OK(pen_object_open(path, PEN_READ, 0, &object, &kit_err));
	for (size_t i = 0; i < extent_count; i++)
		extents[i].object = object;
	OK(pen_transfer(PEN_READ, devices[0], extents, extent_count, options, report, &kit_err));
	pen_object_close(object);
	for (unsigned int i = 0; i < TENSORS; i++) {
		fill(i, wanted);
		OK(pen_device_get(parts[i].device, bytes, parts[i].memory, parts[i].length,
				  &kit_err));
		CHECK(!memcmp(bytes, wanted, parts[i].length));
	}
}

static uint64_t bytes_by(const struct pen_report *report, const char *path)
{
	uint64_t sum = 0;

	for (uint32_t i = 0; i < report->path_count; i++)
		if (!strcmp(report->paths[i].path, path))
			sum += report->paths[i].bytes;
	return sum;
}

TEST(a_file_of_many_parts_is_written_by_one_job_of_whole_blocks)
{
	struct pen_options options = PEN_OPTIONS_INIT;
	struct pen_report report = PEN_REPORT_INIT;
	uint64_t direct;

	open_devices();
	write_all(&options, &report);
	CHECK_EQ(report.bytes, end);
	CHECK_EQ(report.storage_bytes, end);
	direct = bytes_by(&report, "direct-uring") + bytes_by(&report, "direct-threads");
	if (!direct)
		SKIP("the disk has no direct I/O");
	/* All but what does not fill the last block goes around the page cache. */
	CHECK_EQ(direct, end / 4096 * 4096);
	CHECK_EQ(bytes_by(&report, "cached"), end % 4096);
	close_devices();
}

TEST(one_job_reads_into_the_memory_of_every_device)
{
	struct pen_options options = PEN_OPTIONS_INIT;
	struct pen_report report = PEN_REPORT_INIT;
	const char *path;

	open_devices();
	path = write_all(&options, &report);
	kit_cool(path, 0, 0);
	read_all(path, &options, &report);
	kit_warm(path, 0, 0);
	read_all(path, &options, &report);
	CHECK(bytes_by(&report, "cached") > 0);
	close_devices();
}

TEST(every_type_that_stages_carries_any_memories)
{
	static const int types[] = { PEN_CPU_GPU, PEN_CPU_ASYNC_GPU, PEN_CPU_CACHED_GPU };
	struct pen_options options = PEN_OPTIONS_INIT;
	struct pen_report report = PEN_REPORT_INIT;

	open_devices();
	for (size_t i = 0; i < COUNT(types); i++) {
		kit_at("type %s", pen_transfer_name(types[i]));
		options.transfer = types[i];
		read_all(write_all(&options, &report), &options, &report);
	}
	close_devices();
}

TEST(little_memory_is_enough_for_any_memories)
{
	struct pen_options options = PEN_OPTIONS_INIT;
	struct pen_report report = PEN_REPORT_INIT;

	open_devices();
	options.memory_limit = 256 * KIB;
	read_all(write_all(&options, &report), &options, &report);
	CHECK(report.pinned_bytes <= 256 * KIB);
	close_devices();
}

/* ------------------------------------------------------------------------- what is refused -- */

TEST(mapped_takes_no_memory_of_the_host)
{
	struct pen_options options = PEN_OPTIONS_INIT;
	struct pen_report report = PEN_REPORT_INIT;
	struct pen_object *object;
	const char *path;

	open_devices();
	path = write_all(&options, &report);
	lay_out(false);
	OK(pen_object_open(path, PEN_READ, 0, &object, &kit_err));
	for (size_t i = 0; i < extent_count; i++)
		extents[i].object = object;
	options.transfer = PEN_MAPPED;
	REFUSED(-ENOTSUP, pen_transfer(PEN_READ, devices[1], extents, extent_count, &options, NULL,
				       &kit_err));
	CHECK(strstr(kit_err.message, "host's") != NULL);
	/* What of it a GPU has, it takes. */
	for (size_t i = 0; i < extent_count; i++)
		extents[i].length = extents[i].device == devices[1] ? extents[i].length : 0;
	OK(pen_transfer(PEN_READ, devices[1], extents, extent_count, &options, &report, &kit_err));
	CHECK(bytes_by(&report, "mapped") > 0);
	pen_object_close(object);
	close_devices();
}

TEST(cufile_carries_the_gpus_part_and_the_rest_is_staged)
{
	static unsigned char host[MIB], back[MIB];
	struct pen_options options = PEN_OPTIONS_INIT;
	struct pen_report report = PEN_REPORT_INIT;
	struct pen_extent two[2] = {
		{ .memory = host, .length = MIB }, { .offset = MIB, .length = MIB } };
	struct pen_object *object;
	void *memory;
	char path[128];

	open_devices();
	two[0].device = devices[0];
	OK(pen_device_alloc(devices[1], MIB, &memory, &kit_err));
	two[1].memory = memory;
	snprintf(path, sizeof(path), "%s/two", kit_folder(DISK));
	pattern_fill(host, MIB, 0);
	pattern_fill(back, MIB, MIB);
	OK(pen_device_put(devices[1], memory, back, MIB, &kit_err));
	options.transfer = PEN_GPU_DIRECT;
	OK(pen_object_open(path, PEN_WRITE, 2 * MIB, &object, &kit_err));
	two[0].object = two[1].object = object;
	if (pen_transfer(PEN_WRITE, devices[1], two, 2, &options, &report, &kit_err)) {
		CHECK_EQ(kit_err.code, -ENOTSUP);
		SKIP("cuFile is not to be had");
	}
	OK(pen_object_commit(object, &kit_err));
	pen_object_close(object);
	CHECK(kit_holds(path, 2 * MIB));
	CHECK_EQ(bytes_by(&report, "cached"), MIB);
	CHECK_EQ(bytes_by(&report, "cufile-compat") + bytes_by(&report, "gds"), MIB);
	memset(host, 0, MIB);
	OK(pen_object_open(path, PEN_READ, 0, &object, &kit_err));
	two[0].object = two[1].object = object;
	OK(pen_transfer(PEN_READ, devices[1], two, 2, &options, &report, &kit_err));
	CHECK_EQ(pattern_check(host, MIB, 0), MIB);
	pen_object_close(object);
	OK(pen_device_free(devices[1], memory, MIB, &kit_err));
	pen_trim();
	for (int i = 0; i < 3; i++)
		pen_device_close(devices[i]);
	CHECK_EQ(kit_leaks(), 0);
}

/* ---------------------------------------------------------------------------------- streams -- */

typedef int (*set_bytes)(uint64_t, unsigned char, size_t, void *);
typedef int (*make_stream)(void **, unsigned int);
typedef int (*enter)(void *);

static void *driver(const char *name)
{
	void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
	void *found = library ? dlsym(library, name) : NULL;

	CHECK(found != NULL);
	return found;
}

/* On each GPU a stream of the caller's fills memory late; a write must wait for both. */
TEST(each_device_waits_for_a_stream_of_its_own)
{
	struct pen_options options = PEN_OPTIONS_INIT;
	struct pen_stream streams[2] = { { 0 } };
	struct pen_extent two[2] = { { .length = 4 * MIB }, { .offset = 4 * MIB,
							      .length = 4 * MIB } };
	static unsigned char all[8 * MIB];
	struct pen_object *object;
	void *memory[2], *context;
	char path[128];
	int fd;

	open_devices();
	if (!kit_fake_cuda())
		SKIP("only the fake driver is late for certain");
	for (int i = 0; i < 2; i++) {
		OK(pen_device_alloc(devices[1 + i], 4 * MIB, &memory[i], &kit_err));
		CHECK_EQ(((int (*)(void **, int))driver("cuDevicePrimaryCtxRetain"))(&context, i),
			 0);
		CHECK_EQ(((enter)driver("cuCtxSetCurrent"))(context), 0);
		CHECK_EQ(((make_stream)driver("cuStreamCreate"))(&streams[i].stream, 1), 0);
		CHECK_EQ(((set_bytes)driver("cuMemsetD8Async"))((uint64_t)(uintptr_t)memory[i],
							       (unsigned char)(0x51 + i), 4 * MIB,
							       streams[i].stream), 0);
		streams[i].device = devices[1 + i];
		two[i].device = devices[1 + i];
		two[i].memory = memory[i];
	}
	snprintf(path, sizeof(path), "%s/streams", kit_folder(DISK));
	OK(pen_object_open(path, PEN_WRITE, 8 * MIB, &object, &kit_err));
	two[0].object = two[1].object = object;
	options.streams = streams;
	options.stream_count = 2;
	OK(pen_transfer(PEN_WRITE, devices[0], two, 2, &options, NULL, &kit_err));
	OK(pen_object_commit(object, &kit_err));
	pen_object_close(object);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	CHECK_EQ(pread(fd, all, sizeof(all), 0), sizeof(all));
	close(fd);
	for (size_t i = 0; i < sizeof(all); i++)
		CHECK_EQ(all[i], i < 4 * MIB ? 0x51 : 0x52);
	for (int i = 0; i < 2; i++) {
		CHECK_EQ(((int (*)(void *))driver("cuStreamDestroy_v2"))(streams[i].stream), 0);
		CHECK_EQ(((int (*)(int))driver("cuDevicePrimaryCtxRelease_v2"))(i), 0);
		OK(pen_device_free(devices[1 + i], memory[i], 4 * MIB, &kit_err));
	}
	pen_trim();
	for (int i = 0; i < 3; i++)
		pen_device_close(devices[i]);
}

/* A stream of the caller's fills memory late; only a job that waits for it writes the new bytes. */
static void check_stream(struct pen_device *job_device, bool host_memory, bool twice)
{
	struct pen_options options = PEN_OPTIONS_INIT;
	static unsigned char host[4 * MIB], back[4 * MIB];
	struct pen_stream streams[2] = { { .device = devices[1] }, { .device = devices[1] } };
	struct pen_extent extent = { .length = 4 * MIB };
	void *memory, *context;
	char path[128];
	int fd;

	OK(pen_device_alloc(devices[1], 4 * MIB, &memory, &kit_err));
	memset(host, 0, sizeof(host));
	CHECK_EQ(((int (*)(void **, int))driver("cuDevicePrimaryCtxRetain"))(&context, 0), 0);
	CHECK_EQ(((enter)driver("cuCtxSetCurrent"))(context), 0);
	for (int i = 0; i < 2; i++)
		CHECK_EQ(((make_stream)driver("cuStreamCreate"))(&streams[i].stream, 1), 0);
	CHECK_EQ(((set_bytes)driver("cuMemsetD8Async"))((uint64_t)(uintptr_t)memory, 0x77, 4 * MIB,
						       streams[0].stream), 0);
	CHECK_EQ(((int (*)(void *, size_t, unsigned int))driver("cuMemHostRegister_v2"))(
			 host, sizeof(host), 1), 0);
	if (host_memory)
		CHECK_EQ(((int (*)(void *, uint64_t, size_t, void *))
			  driver("cuMemcpyDtoHAsync_v2"))(host, (uint64_t)(uintptr_t)memory,
							  4 * MIB, streams[0].stream), 0);
	snprintf(path, sizeof(path), "%s/stream", kit_folder(DISK));
	OK(pen_object_open(path, PEN_WRITE, 4 * MIB, &extent.object, &kit_err));
	extent.device = host_memory ? devices[0] : devices[1];
	extent.memory = host_memory ? (void *)host : memory;
	options.streams = streams;
	options.stream_count = twice ? 2 : 1;
	OK(pen_transfer(PEN_WRITE, job_device, &extent, 1, &options, NULL, &kit_err));
	OK(pen_object_commit(extent.object, &kit_err));
	pen_object_close(extent.object);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	CHECK_EQ(pread(fd, back, sizeof(back), 0), sizeof(back));
	close(fd);
	for (size_t i = 0; i < sizeof(back); i++)
		CHECK_EQ(back[i], 0x77);
	for (int i = 0; i < 2; i++)
		CHECK_EQ(((int (*)(void *))driver("cuStreamDestroy_v2"))(streams[i].stream), 0);
	CHECK_EQ(((int (*)(void *))driver("cuMemHostUnregister"))(host), 0);
	CHECK_EQ(((int (*)(int))driver("cuDevicePrimaryCtxRelease_v2"))(0), 0);
	OK(pen_device_free(devices[1], memory, 4 * MIB, &kit_err));
}

TEST(every_stream_that_is_named_comes_first)
{
	open_devices();
	if (!kit_fake_cuda())
		SKIP("only the fake driver is late for certain");
	check_stream(devices[1], false, true);
	check_stream(devices[0], false, false);
	check_stream(devices[0], true, false);
	check_stream(devices[2], true, true);
	pen_trim();
	for (int i = 0; i < 3; i++)
		pen_device_close(devices[i]);
}

TEST(a_stream_without_a_gpu_is_refused)
{
	struct pen_options options = PEN_OPTIONS_INIT;
	struct pen_stream stream = { .stream = PEN_STREAM_LEGACY };

	devices[0] = kit_device("host");
	options.stream = PEN_STREAM_LEGACY;
	REFUSED(-EINVAL, pen_transfer(PEN_READ, devices[0], NULL, 0, &options, NULL, &kit_err));
	options.stream = NULL;
	options.stream_count = 1;
	REFUSED(-EINVAL, pen_transfer(PEN_READ, devices[0], NULL, 0, &options, NULL, &kit_err));
	options.streams = &stream;
	REFUSED(-EINVAL, pen_transfer(PEN_READ, devices[0], NULL, 0, &options, NULL, &kit_err));
	stream.device = devices[0];
	REFUSED(-EINVAL, pen_transfer(PEN_READ, devices[0], NULL, 0, &options, NULL, &kit_err));
	REFUSED(-EINVAL, pen_transfer(PEN_READ, NULL, NULL, 0, NULL, NULL, &kit_err));
	pen_device_close(devices[0]);
}

TEST(memory_is_allocated_also_where_no_byte_goes_there)
{
	struct pen_options options = PEN_OPTIONS_INIT;
	static unsigned char host[MIB];
	struct pen_extent extent = { .memory = host, .length = MIB };
	void *memory = NULL;

	open_devices();
	OK(pen_object_open("pattern:1M", PEN_READ, 0, &extent.object, &kit_err));
	extent.device = devices[0];
	options.allocate = MIB;
	options.allocated = &memory;
	OK(pen_transfer(PEN_READ, devices[1], &extent, 1, &options, NULL, &kit_err));
	CHECK(memory != NULL);
	CHECK_EQ(pattern_check(host, MIB, 0), MIB);
	OK(pen_device_free(devices[1], memory, MIB, &kit_err));
	pen_object_close(extent.object);
	pen_trim();
	for (int i = 0; i < 3; i++)
		pen_device_close(devices[i]);
}

TEST_MAIN
