/* SPDX-License-Identifier: MIT */
/*
 * Which way bytes take: options that make no sense, types that cannot be had and say what can,
 * hot and cold ranges of one file, and promises about lanes and memory kept down to the smallest.
 */
#include "engine/schedule.h"
#include "fake_gpu.h"
#include "scratch.h"

#define MIB (1ull << 20)

static struct pen_error err;
static struct pen_device *device;
static struct pen_object *object;
static unsigned char *memory;

/* ----------------------------------------------------------------------------- options -- */

TEST(no_options_are_the_defaults)
{
	struct pen_options full;

	CHECK_EQ(schedule_options(NULL, &full, &err), 0);
	CHECK_EQ(full.transfer, PEN_AUTO);
	CHECK_EQ(full.memory_limit, 128 * MIB);
	CHECK(!full.gap && !full.lanes && !full.depth && !full.request_size && !full.inject);
}

TEST(options_of_an_older_and_of_a_newer_header_are_taken)
{
	struct {
		struct pen_options known;
		uint64_t future[4];
	} newer = { .known = PEN_OPTIONS_INIT };
	struct pen_options older = PEN_OPTIONS_INIT, full;

	newer.known.size = sizeof(newer);
	newer.known.lanes = 3;
	CHECK_EQ(schedule_options(&newer.known, &full, &err), 0);
	CHECK_EQ(full.lanes, 3);
	CHECK_EQ(full.size, sizeof(full));
	/* What this library does not know cannot be done, so it must not be asked for. */
	newer.future[3] = 1;
	CHECK_EQ(schedule_options(&newer.known, &full, &err), -EINVAL);
	CHECK(strstr(err.message, "older"));
	older.size = offsetof(struct pen_options, lanes);
	older.memory_limit = MIB;
	older.lanes = 1000;
	CHECK_EQ(schedule_options(&older, &full, &err), 0);
	CHECK_EQ(full.memory_limit, MIB);
	CHECK_EQ(full.lanes, 0);
}

static int options_with(size_t field, size_t size, uint64_t value)
{
	struct pen_options given = PEN_OPTIONS_INIT, full;

	memcpy((char *)&given + field, &value, size);
	memset(&err, 0, sizeof(err));
	return schedule_options(&given, &full, &err);
}

#define WITH(name, value) \
	options_with(offsetof(struct pen_options, name), \
		     sizeof(((struct pen_options *)0)->name), (uint64_t)(value))

TEST(options_that_make_no_sense_are_refused_in_words)
{
	CHECK_EQ(WITH(size, 0), -EINVAL);
	CHECK(strstr(err.message, "size"));
	CHECK_EQ(WITH(transfer, 10), -EINVAL);
	CHECK_EQ(WITH(transfer, -1), -EINVAL);
	CHECK(strstr(err.message, "-1"));
	CHECK_EQ(WITH(cache, 5), -EINVAL);
	CHECK_EQ(WITH(cache, -1), -EINVAL);
	CHECK_EQ(WITH(memory_limit, 65535), -EINVAL);
	CHECK(strstr(err.hint, "64 KiB"));
	CHECK_EQ(WITH(memory_limit, 65536), 0);
	CHECK_EQ(WITH(request_size, 2048), -EINVAL);
	CHECK(strstr(err.hint, "power of two"));
	CHECK_EQ(WITH(request_size, 5000), -EINVAL);
	CHECK_EQ(WITH(request_size, 1ull << 31), -EINVAL);
	CHECK_EQ(WITH(request_size, 1ull << 32), -EINVAL);
	CHECK_EQ(WITH(request_size, 256 * MIB), -EINVAL);
	CHECK(strstr(err.hint, "memory limit"));
	CHECK_EQ(WITH(request_size, 128 * MIB), 0);
	CHECK_EQ(WITH(request_size, 4096), 0);
	CHECK_EQ(WITH(lanes, 65), -EINVAL);
	CHECK_EQ(WITH(lanes, 64), 0);
	CHECK_EQ(WITH(inject, (uintptr_t)"nonsense"), -EINVAL);
	CHECK_EQ(WITH(inject, (uintptr_t)"fail:1"), 0);
}

TEST(types_have_names_and_numbers)
{
	int type = 77;

	for (int i = PEN_AUTO; i <= PEN_MAPPED; i++) {
		CHECK(pen_transfer_name(i) != NULL);
		CHECK_EQ(pen_transfer_parse(pen_transfer_name(i), &type, &err), 0);
		CHECK_EQ(type, i);
	}
	CHECK(!pen_transfer_name(-1) && !pen_transfer_name(10));
	CHECK_EQ(pen_transfer_parse("cpu_async_gpu", &type, NULL), 0);
	CHECK_EQ(type, PEN_CPU_ASYNC_GPU);
	CHECK_EQ(pen_transfer_parse("7", &type, NULL), 0);
	CHECK_EQ(type, PEN_GPU_BATCH_STREAM);
	CHECK_EQ(pen_transfer_parse("8", &type, &err), -EINVAL);
	CHECK_EQ(pen_transfer_parse("", &type, &err), -EINVAL);
	CHECK_EQ(pen_transfer_parse("-1", &type, &err), -EINVAL);
	CHECK(strstr(err.hint, "CPU_CACHED_GPU") && strstr(err.hint, "MAPPED"));
}

TEST(types_are_known_by_the_way_that_bytes_go)
{
	static const struct {
		const char *way;
		int type;
	} ways[] = {
		{ "Storage->GPU", PEN_GPU_DIRECT },
		{ "Storage->CPU", PEN_CPU_ONLY },
		{ "Storage->CPU->GPU", PEN_CPU_GPU },
		{ "Storage->CPU->GPU_ASYNC", PEN_CPU_ASYNC_GPU },
		{ "Storage->PAGE_CACHE->CPU->GPU", PEN_CPU_CACHED_GPU },
		{ "Storage->GPU_ASYNC", PEN_GPU_DIRECT_ASYNC },
		{ "Storage->GPU_BATCH", PEN_GPU_BATCH },
		{ "storage->cpu->gpu_async", PEN_CPU_ASYNC_GPU },
	};
	int type;

	for (size_t i = 0; i < sizeof(ways) / sizeof(ways[0]); i++) {
		type = 77;
		CHECK_EQ(pen_transfer_parse(ways[i].way, &type, &err), 0);
		CHECK_EQ(type, ways[i].type);
	}
	CHECK_EQ(pen_transfer_parse("Storage->", &type, &err), -EINVAL);
	CHECK_EQ(pen_transfer_parse("Storage->TPU", &type, &err), -EINVAL);
}

TEST(paths_are_one_list_and_step_down_to_an_end)
{
	const char *what;

	for (unsigned int i = 0; i < PATHS; i++) {
		unsigned int steps = 0;

		CHECK_TEXT(pen_path_name(i, &what), path_kinds[i].name);
		CHECK(what[0] && path_kinds[i].queue);
		for (enum path_id at = i; at != PATH_NONE; at = path_kinds[at].down)
			CHECK(steps++ < PATHS);
		for (unsigned int other = 0; other < i; other++)
			CHECK(strcmp(pen_path_name(other, NULL), pen_path_name(i, NULL)));
	}
	CHECK(!pen_path_name(PATHS, &what));
}

/* ------------------------------------------------------------------------------- types -- */

static int choose(enum pen_mode direction, int transfer, struct pen_extent *extent)
{
	struct pen_options given = PEN_OPTIONS_INIT, full;
	struct schedule *schedule;
	int rc;

	given.transfer = transfer;
	CHECK_EQ(schedule_options(&given, &full, &err), 0);
	memset(&err, 0, sizeof(err));
	rc = schedule_new(direction, device, extent, NULL, 1, &full, &schedule, &err);
	schedule_free(schedule);
	return rc;
}

static void open_all(const char *device_name, const char *name, enum pen_mode mode)
{
	CHECK_EQ(pen_device_open(device_name, &device, &err), 0);
	CHECK_EQ(pen_object_open(name, mode, 8 * MIB, &object, &err), 0);
	CHECK_EQ(pen_device_alloc(device, 8 * MIB, (void **)&memory, &err), 0);
}

static void close_all(void)
{
	CHECK_EQ(pen_device_free(device, memory, 8 * MIB, &err), 0);
	pen_object_close(object);
	pen_trim();
	pen_device_close(device);
}

/* Refused, with its own name, a reason and the nearest type that works. */
static void check_refused(enum pen_mode direction, int transfer, const char *reason, int nearest)
{
	struct pen_extent all = { .object = object, .memory = memory, .length = 8 * MIB };
	char want[64];

	CHECK_EQ(choose(direction, transfer, &all), -ENOTSUP);
	CHECK_TEXT(err.object, pen_transfer_name(transfer));
	snprintf(want, sizeof(want), "%d %s", pen_transfer_number(nearest),
		 pen_transfer_name(nearest));
	if (!strstr(err.message, reason) || !strstr(err.hint, want))
		fprintf(stderr, "%s. %s\n", err.message, err.hint);
	CHECK(strstr(err.message, reason) && strstr(err.hint, want));
	/* And that one does work. */
	CHECK_EQ(choose(direction, nearest, &all), 0);
}

TEST(types_for_a_gpu_are_refused_on_the_host)
{
	open_all("host", make_file("file", 8 * MIB), PEN_READ);
	for (int type = PEN_GPU_DIRECT; type <= PEN_MAPPED; type++)
		if (type != PEN_CPU_ONLY)
			check_refused(PEN_READ, type, "no GPU", PEN_CPU_ONLY);
	close_all();
}

TEST(the_hosts_type_is_refused_on_a_gpu)
{
	NEED_FAKE_GPU();
	open_all("cuda:0", make_file("file", 8 * MIB), PEN_READ);
	check_refused(PEN_READ, PEN_CPU_ONLY, "GPU's", PEN_CPU_ASYNC_GPU);
	close_all();
}

TEST(mapped_is_refused_where_there_is_nothing_to_map)
{
	NEED_FAKE_GPU();
	open_all("cuda:0", in_scratch("new"), PEN_WRITE);
	check_refused(PEN_WRITE, PEN_MAPPED, "reads only", PEN_CPU_ASYNC_GPU);
	close_all();
	open_all("cuda:0", "pattern:8M", PEN_READ);
	check_refused(PEN_READ, PEN_MAPPED, "no page cache", PEN_CPU_ASYNC_GPU);
	close_all();
}

TEST(mapped_is_refused_by_a_driver_that_cannot)
{
	NEED_FAKE_GPU();
	setenv("FAKE_CUDA_READ_ONLY_REGISTER", "0", 1);
	open_all("cuda:0", make_file("file", 8 * MIB), PEN_READ);
	check_refused(PEN_READ, PEN_MAPPED, "read-only memory", PEN_CPU_CACHED_GPU);
	close_all();
}

TEST(cufile_is_refused_for_what_is_no_file)
{
	static const int types[] = { PEN_GPU_DIRECT, PEN_GPU_DIRECT_ASYNC, PEN_GPU_BATCH,
				     PEN_GPU_BATCH_STREAM };

	NEED_FAKE_GPU();
	open_all("cuda:0", "pattern:8M", PEN_READ);
	for (int i = 0; i < 4; i++)
		check_refused(PEN_READ, types[i], "synthetic", PEN_CPU_ASYNC_GPU);
	close_all();
}

TEST(cufile_is_refused_with_its_own_words_where_it_is_broken)
{
	static const int types[] = { PEN_GPU_DIRECT, PEN_GPU_DIRECT_ASYNC, PEN_GPU_BATCH,
				     PEN_GPU_BATCH_STREAM };

	NEED_FAKE_GPU();
	setenv("FAKE_CUFILE_DRIVER_ERROR", "5001", 1);
	open_all("cuda:0", make_file("file", 8 * MIB), PEN_READ);
	for (int i = 0; i < 4; i++)
		check_refused(PEN_READ, types[i], "5001", PEN_CPU_ASYNC_GPU);
	close_all();
}

TEST(auto_never_takes_cufile_in_compatibility_mode)
{
	struct pen_report report = PEN_REPORT_INIT;
	struct pen_extent all;

	NEED_FAKE_GPU();
	open_all("cuda:0", make_file("file", 8 * MIB), PEN_READ);
	all = (struct pen_extent){ .object = object, .memory = memory, .length = 8 * MIB };
	CHECK_EQ(pen_transfer(PEN_READ, device, &all, 1, NULL, &report, &err), 0);
	for (unsigned int i = 0; i < report.path_count; i++)
		CHECK(strcmp(report.paths[i].path, "cufile-compat") &&
		      strcmp(report.paths[i].path, "gds"));
	CHECK(report.refused_count && !strcmp(report.refused[0].path, "gds"));
	close_all();
}

/* ------------------------------------------------------------------------ hot and cold -- */

/* A file whose first half is in the page cache and whose second half is not; false where pages
 * cannot be dropped. */
static bool half_cached(const char *path, uint64_t size)
{
	static char bytes[1 << 20];
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	uint64_t resident;
	struct pen_object *asked;

	CHECK(fd >= 0);
	posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
	posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM);
	for (uint64_t at = 0; at < size / 2; at += sizeof(bytes))
		CHECK_EQ(pread(fd, bytes, sizeof(bytes), (off_t)at), sizeof(bytes));
	close(fd);
	CHECK_EQ(pen_object_open(path, PEN_READ, 0, &asked, &err), 0);
	CHECK_EQ(object_residency(asked, size / 2, size / 2, &resident, &err), 0);
	if (!asked->info.offset_align)
		resident = 1;
	pen_object_close(asked);
	return !resident;
}

static struct schedule *choose_read(uint64_t size, const struct pen_options *given)
{
	struct pen_extent all = { .object = object, .memory = memory, .length = size };
	struct pen_options full;
	struct schedule *schedule;

	CHECK_EQ(schedule_options(given, &full, &err), 0);
	CHECK_EQ(schedule_new(PEN_READ, device, &all, NULL, 1, &full, &schedule, &err), 0);
	return schedule;
}

TEST(hot_and_cold_ranges_of_one_file_are_told_apart)
{
	const char *file = make_file("file", 64 * MIB);
	struct schedule *schedule;

	if (!half_cached(file, 64 * MIB))
		SKIP("pages cannot be dropped or direct reads not be had here");
	open_all("host", file, PEN_READ);
	schedule = choose_read(64 * MIB, NULL);
	CHECK_EQ(schedule->work[THROUGH].bytes, 32 * MIB);
	CHECK_EQ(schedule->work[AROUND].bytes, 32 * MIB);
	CHECK_EQ(schedule->plan->requests[schedule->work[THROUGH].requests[0]].offset, 0);
	CHECK_EQ(schedule->plan->requests[schedule->work[AROUND].requests[0]].offset, 32 * MIB);
	CHECK_EQ(schedule->path_count, 2);
	for (unsigned int i = 0; i < 2; i++)
		CHECK(schedule->paths[i].kind->direct == (schedule->paths[i].side == AROUND));
	schedule_free(schedule);
	close_all();
}

TEST(one_lane_takes_one_path)
{
	const char *file = make_file("file", 16 * MIB);
	struct pen_options given = PEN_OPTIONS_INIT;
	struct schedule *schedule;

	if (!half_cached(file, 16 * MIB))
		SKIP("pages cannot be dropped or direct reads not be had here");
	open_all("host", file, PEN_READ);
	given.lanes = 1;
	schedule = choose_read(16 * MIB, &given);
	CHECK_EQ(schedule->path_count, 1);
	CHECK_EQ(schedule->paths[0].lanes, 1);
	CHECK_EQ(schedule->work[THROUGH].bytes + schedule->work[AROUND].bytes, 16 * MIB);
	CHECK_EQ(schedule->work[THROUGH].count + schedule->work[AROUND].count,
		 schedule->plan->request_count);
	schedule_free(schedule);
	close_all();
}

TEST(the_cache_policy_keeps_everything_in_the_cache)
{
	const char *file = make_file("file", 16 * MIB);
	struct pen_options given = PEN_OPTIONS_INIT;
	struct schedule *schedule;

	half_cached(file, 16 * MIB);
	open_all("host", file, PEN_READ);
	given.cache = PEN_CACHE_KEEP;
	schedule = choose_read(16 * MIB, &given);
	CHECK_EQ(schedule->work[AROUND].count, 0);
	CHECK(!schedule->paths[0].kind->direct && strstr(schedule->paths[0].reason, "keep"));
	schedule_free(schedule);
	close_all();
}

TEST(lanes_are_never_more_than_asked_for)
{
	const char *file = make_file("file", 64 * MIB);
	struct pen_options given = PEN_OPTIONS_INIT;

	half_cached(file, 64 * MIB);
	open_all("host", file, PEN_READ);
	for (uint32_t lanes = 1; lanes <= 64; lanes = lanes * 2 + 1) {
		struct schedule *schedule;
		unsigned int sum = 0;

		given.lanes = lanes;
		schedule = choose_read(64 * MIB, &given);
		for (unsigned int i = 0; i < schedule->path_count; i++) {
			CHECK(schedule->paths[i].lanes);
			sum += schedule->paths[i].lanes;
		}
		CHECK(sum <= lanes);
		schedule_free(schedule);
	}
	close_all();
}

/* -------------------------------------------------------------------- promises of memory -- */

/* Into memory that is not aligned, so that everything is staged, in slices with holes. */
static void transfer_within(uint64_t limit, uint64_t request_size, uint32_t lanes, int transfer)
{
	struct pen_options given = PEN_OPTIONS_INIT;
	struct pen_report report = PEN_REPORT_INIT;
	struct pen_extent rows = { .object = object, .offset = 100, .memory = memory + 1,
		.length = 3000, .rows = 1000, .object_pitch = 4001, .memory_pitch = 3003 };
	static unsigned char bytes[3003 * 1000];
	int rc;

	given.memory_limit = limit;
	given.request_size = request_size;
	given.lanes = lanes;
	given.transfer = transfer;
	rc = pen_transfer(PEN_READ, device, &rows, 1, &given, &report, &err);
	if (rc)
		fprintf(stderr, "limit %llu: %s. %s\n", (unsigned long long)limit, err.message,
			err.hint);
	CHECK(!rc);
	if (report.pinned_bytes > limit)
		fprintf(stderr, "%llu pinned\n", (unsigned long long)report.pinned_bytes);
	CHECK(report.pinned_bytes <= limit);
	CHECK_EQ(report.bytes, 3000 * 1000);
	CHECK(!lanes || report.lanes <= lanes);
	CHECK_EQ(pen_device_get(device, bytes, memory + 1, sizeof(bytes) - 3, &err), 0);
	for (uint64_t row = 0; row < 1000; row++)
		CHECK_EQ(pattern_check(bytes + row * 3003, 3000, 100 + row * 4001), 3000);
}

static const uint64_t limits[] = { 65536, 65537, 100000, 131072, 1 << 20, 5 << 20, 128 << 20 };

static void tiny_limits(const char *device_name)
{
	const char *file = make_file("file", 8 * MIB);

	for (int cached = 0; cached < 2; cached++) {
		open_all(device_name, file, PEN_READ);
		for (size_t i = 0; i < sizeof(limits) / sizeof(limits[0]); i++) {
			if (!cached)
				object_uncache(object, NULL);
			transfer_within(limits[i], 0, 0, PEN_AUTO);
			transfer_within(limits[i], i < 4 ? 4096 << i : 65536, 1 + (uint32_t)i % 3,
					PEN_AUTO);
		}
		close_all();
	}
}

TEST(a_tiny_memory_limit_is_kept_on_the_host)
{
	tiny_limits("host");
}

TEST(a_tiny_memory_limit_is_kept_on_a_gpu)
{
	NEED_FAKE_GPU();
	tiny_limits("cuda:0");
}

TEST(a_tiny_memory_limit_is_kept_one_step_at_a_time)
{
	NEED_FAKE_GPU();
	open_all("cuda:0", make_file("file", 8 * MIB), PEN_READ);
	transfer_within(65536, 0, 0, PEN_CPU_GPU);
	transfer_within(1 << 20, 0, 3, PEN_CPU_GPU);
	close_all();
}

TEST(a_tiny_memory_limit_is_kept_for_writes)
{
	struct pen_options given = PEN_OPTIONS_INIT;
	struct pen_report report = PEN_REPORT_INIT;

	NEED_FAKE_GPU();
	for (size_t i = 0; i < sizeof(limits) / sizeof(limits[0]); i++) {
		struct pen_extent all;
		static unsigned char bytes[8 << 20];

		open_all("cuda:0", in_scratch("new"), PEN_WRITE);
		pattern_fill(bytes, 8 * MIB, 0);
		CHECK_EQ(pen_device_put(device, memory, bytes, 8 * MIB, &err), 0);
		all = (struct pen_extent){ .object = object, .memory = memory, .length = 8 * MIB };
		given.memory_limit = limits[i];
		CHECK_EQ(pen_transfer(PEN_WRITE, device, &all, 1, &given, &report, &err), 0);
		CHECK(report.pinned_bytes <= limits[i]);
		CHECK_EQ(pen_object_commit(object, &err), 0);
		CHECK_EQ(good_bytes(in_scratch("new")), 8 * MIB);
		close_all();
	}
}

TEST(reads_straight_into_memory_beside_staged_ones_stage_no_more_than_needed)
{
	const char *file = make_file("file", 64 * MIB);
	struct pen_options given = PEN_OPTIONS_INIT;
	struct pen_report report = PEN_REPORT_INIT;
	struct pen_extent extents[128];

	/* Aligned and unaligned by turns, 8 in flight from one lane: at most 4 MiB are staged. */
	CHECK_EQ(pen_device_open("host", &device, &err), 0);
	CHECK_EQ(pen_object_open(file, PEN_READ, 0, &object, &err), 0);
	CHECK_EQ(pen_device_alloc(device, 64 * MIB, (void **)&memory, &err), 0);
	object_uncache(object, NULL);
	for (int i = 0; i < 128; i++)
		extents[i] = (struct pen_extent){
			.object = object, .offset = (uint64_t)i * (MIB / 2),
			.memory = memory + (uint64_t)i * (MIB / 2) + i % 2,
			.length = MIB / 2 - 4096,
		};
	given.gap = UINT64_MAX;
	given.lanes = 1;
	given.depth = 8;
	CHECK_EQ(pen_transfer(PEN_READ, device, extents, 128, &given, &report, &err), 0);
	printf("%llu bytes pinned\n", (unsigned long long)report.pinned_bytes);
	CHECK(report.pinned_bytes <= 8 * MIB);
	for (int i = 0; i < 128; i++)
		CHECK_EQ(pattern_check(extents[i].memory, extents[i].length, extents[i].offset),
			 extents[i].length);
	CHECK_EQ(pen_device_free(device, memory, 64 * MIB, &err), 0);
	pen_object_close(object);
	pen_trim();
	pen_device_close(device);
}

/* A matrix whose rows are 40 KiB, and memory for the left halves of its 1024 rows. */
static void open_halves(const char *file, bool cold)
{
	CHECK_EQ(pen_device_open("host", &device, &err), 0);
	CHECK_EQ(pen_object_open(file, PEN_READ, 0, &object, &err), 0);
	CHECK_EQ(pen_device_alloc(device, 20 * MIB, (void **)&memory, &err), 0);
	if (cold && object_uncache(object, &err))
		SKIP("pages cannot be dropped here");
}

static void check_halves(void)
{
	for (uint64_t row = 0; row < 1024; row++)
		CHECK_EQ(pattern_check(memory + row * (20 << 10), 20 << 10, row * (40 << 10)),
			 20 << 10);
	CHECK_EQ(pen_device_free(device, memory, 20 * MIB, &err), 0);
	pen_object_close(object);
	pen_trim();
	pen_device_close(device);
}

/* The left half of a matrix whose rows are 40 KiB; how much crossed the store? */
static uint64_t half_of_each_row(uint64_t gap, bool cold)
{
	const char *file = make_file("file", 40 * MIB);
	struct pen_options given = PEN_OPTIONS_INIT;
	struct pen_report report = PEN_REPORT_INIT;
	struct pen_extent half = {
		.length = 20 << 10, .rows = 1024,
		.object_pitch = 40 << 10, .memory_pitch = 20 << 10,
	};

	open_halves(file, cold);
	half.object = object;
	half.memory = memory;
	given.gap = gap;
	CHECK_EQ(pen_transfer(PEN_READ, device, &half, 1, &given, &report, &err), 0);
	check_halves();
	return report.storage_bytes;
}

TEST(a_strided_slice_of_a_cold_file_reads_little_more_than_its_bytes)
{
	CHECK(half_of_each_row(0, true) <= 22 * MIB);
}

TEST(holes_in_the_page_cache_are_read_through)
{
	CHECK(half_of_each_row(0, false) >= 39 * MIB);
}

TEST(how_large_a_hole_is_read_through_can_be_said)
{
	CHECK(half_of_each_row(UINT64_MAX, false) == 20 * MIB);
	CHECK(half_of_each_row(64 << 10, true) >= 39 * MIB);
}

/* The same half as 1024 extents; how much crossed the store? The first `kept` rows of a cold file
 * are in the page cache. */
static uint64_t half_of_each_row_by_extents(bool cold, int kept)
{
	const char *file = make_file("file", 40 * MIB);
	struct pen_report report = PEN_REPORT_INIT;
	static struct pen_extent halves[1024];
	static char row[40 << 10];
	int fd;

	open_halves(file, cold);
	fd = open(file, O_RDONLY);
	CHECK(fd >= 0 && !posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM));
	for (int i = 0; i < kept; i++)
		CHECK_EQ(pread(fd, row, sizeof(row), i * (off_t)sizeof(row)), sizeof(row));
	close(fd);
	for (uint64_t i = 0; i < 1024; i++)
		halves[i] = (struct pen_extent){
			.object = object, .offset = i * (40 << 10),
			.memory = memory + i * (20 << 10), .length = 20 << 10,
		};
	CHECK_EQ(pen_transfer(PEN_READ, device, halves, 1024, NULL, &report, &err), 0);
	check_halves();
	return report.storage_bytes;
}

TEST(holes_between_plain_extents_are_judged_like_those_of_strided_ones)
{
	CHECK(half_of_each_row_by_extents(false, 0) >= 39 * MIB);
	CHECK(half_of_each_row_by_extents(true, 0) <= 22 * MIB);
}

TEST(the_first_extents_do_not_decide_alone)
{
	CHECK(half_of_each_row_by_extents(true, 100) <= 24 * MIB);
}

TEST_MAIN
