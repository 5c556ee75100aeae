/* SPDX-License-Identifier: MIT */
/*
 * One set of cases over every object x route x device. A route is a transfer type with the state
 * of the page cache and the options that force one queue or another; a cell is one combination
 * that makes sense. Each case is one behaviour, run in all cells; every byte that arrives is
 * checked against the pattern, the bytes around it against a guard, and every report against its
 * own sums and the memory promise. A cell also proves its route: the report of its jobs must name
 * the path that the row names.
 *
 * With the fake drivers (LD_LIBRARY_PATH) there are two GPUs. What a machine cannot run is named on
 * standard output (kit_not_run); a case of which nothing can run is skipped.
 */
#include <pthread.h>
#include <time.h>
#include "io/object.h"
#include "kit.h"
#include "sys/fault.h"

/* ------------------------------------------------------------------------------ the matrix -- */

enum { ON_DISK = 1, ON_SHM = 2, MADE_UP = 4, FILES = ON_DISK | ON_SHM, ANYWHERE = 7 };
enum { TO_HOST = 1, TO_GPU = 2, TO_ANY = 3 };
enum { READS = 1, WRITES = 2, BOTH = 3 };
/* Cases whose jobs are too small for a ring of their own, or of which none ends well. */
enum { SMALL = 4, WITHOUT_REPORT = 8 };

#define URING "direct-uring"
#define THREADS "direct-threads"
#define COMPAT "cufile-compat"

struct route {
	const char *name;
	const char *path;		/* on a disk, as the report calls it */
	int transfer;
	unsigned int stores, devices, directions;
	bool hot;			/* in the page cache; else dropped from it */
	bool no_uring;			/* the kernel forbids io_uring */
	const char *inject;
	uint64_t memory_limit, request_size;
	uint32_t lanes, depth;
};

static const struct route routes[] = {
	{ "auto, cold", URING, PEN_AUTO, ANYWHERE, TO_ANY, BOTH },
	{ "auto, hot", "cached", PEN_AUTO, FILES, TO_ANY, READS, .hot = true },
	{ "auto, no io_uring", THREADS, PEN_AUTO, ON_DISK, TO_ANY, BOTH, .no_uring = true },
	{ "auto, wrapped", URING, PEN_AUTO, ANYWHERE, TO_ANY, BOTH,
	  .inject = "delay:1000000:1ms" },
	{ "auto, small requests", URING, PEN_AUTO, ANYWHERE, TO_ANY, BOTH, .memory_limit = 1 << 20,
	  .request_size = 64 << 10, .lanes = 3, .depth = 8 },
	{ "auto, hot, small requests", "cached", PEN_AUTO, FILES, TO_ANY, READS, .hot = true,
	  .memory_limit = 1 << 20, .request_size = 16 << 10, .lanes = 2 },
	{ "CPU_ONLY", URING, PEN_CPU_ONLY, ANYWHERE, TO_HOST, BOTH },
	{ "CPU_GPU", URING, PEN_CPU_GPU, ANYWHERE, TO_GPU, BOTH },
	{ "CPU_ASYNC_GPU", URING, PEN_CPU_ASYNC_GPU, ANYWHERE, TO_GPU, BOTH },
	{ "CPU_CACHED_GPU", "cached", PEN_CPU_CACHED_GPU, ANYWHERE, TO_GPU, BOTH },
	{ "MAPPED", "mapped", PEN_MAPPED, FILES, TO_GPU, READS, .hot = true },
	{ "GPU_DIRECT", COMPAT, PEN_GPU_DIRECT, ON_DISK, TO_GPU, BOTH },
	{ "GPU_DIRECT_ASYNC", COMPAT, PEN_GPU_DIRECT_ASYNC, ON_DISK, TO_GPU, BOTH },
	{ "GPU_BATCH", COMPAT, PEN_GPU_BATCH, ON_DISK, TO_GPU, BOTH },
	{ "GPU_BATCH_STREAM", COMPAT, PEN_GPU_BATCH_STREAM, ON_DISK, TO_GPU, BOTH },
};

/* A file (or synthetic object) of `size` bytes with the pattern in [from, from + length). */
struct shape {
	uint64_t size, from, length;
};

#define GUARD 4096u
#define GUARD_BYTE 0xA5
#define BED_SIZE (20 * MIB)

struct cell {
	const struct route *route;
	unsigned int store;
	struct pen_device *device;
	bool gpu;
	char name[256];			/* of the object to read */
	char target[256];		/* of the object to write */
	unsigned char *memory;		/* of the device, BED_SIZE bytes */
	unsigned char *mirror;		/* of the host, as large */
	struct pen_options options;
	struct pen_report report;	/* of the last transfer */
	bool declined;			/* the case is not about this cell */
};

static const char *const device_names[] = { "host", "cuda:0", "cuda:1" };
static atomic_bool uring_forbidden;

static int forbid_uring(const char *name)
{
	return uring_forbidden && !strcmp(name, "io_uring_setup") ? EPERM : 0;
}

static bool placed(const struct cell *cell)
{
	int type = cell->route->transfer;

	return type == PEN_GPU_DIRECT ||
	       (type >= PEN_GPU_DIRECT_ASYNC && type <= PEN_GPU_BATCH_STREAM);
}

static void set_options(struct cell *cell)
{
	const struct route *route = cell->route;

	cell->options = (struct pen_options){
		.size = sizeof(cell->options),
		.transfer = route->transfer,
		.memory_limit = route->memory_limit,
		.request_size = route->request_size,
		.lanes = route->lanes,
		.depth = route->depth,
		.inject = route->inject,
	};
	uring_forbidden = route->no_uring;
}

static void name_objects(struct cell *cell, const struct shape *shape)
{
	const char *folder;

	if (cell->store == MADE_UP) {
		snprintf(cell->name, sizeof(cell->name), "pattern:%llu",
			 (unsigned long long)shape->size);
		return;
	}
	folder = kit_folder(cell->store == ON_SHM ? SHM : DISK);
	snprintf(cell->name, sizeof(cell->name), "%s/source", folder);
	snprintf(cell->target, sizeof(cell->target), "%s/target", folder);
	if (access(cell->name, F_OK) && shape->size) {
		kit_write(cell->name, shape->from, shape->length, -1);
		CHECK_EQ(truncate(cell->name, (off_t)shape->size), 0);
	}
}

/* ------------------------------------------------------------------------ proving the route -- */

static const char *const path_names[] = {
	URING, THREADS, "cached", "mapped", "gds", COMPAT, "synthetic",
};
static atomic_uint taken;		/* bits of path_names: where bytes went in this cell */

static unsigned int path_bit(const char *name)
{
	for (unsigned int i = 0; i < COUNT(path_names); i++)
		if (!strcmp(path_names[i], name))
			return 1u << i;
	fprintf(stderr, "%s is no path that this suite knows\n", name);
	exit(1);
}

static void note_paths(const struct pen_report *report)
{
	for (uint32_t i = 0; i < report->path_count; i++)
		if (report->paths[i].bytes)
			taken |= path_bit(report->paths[i].path);
}

static const char *path_of(const struct cell *cell, unsigned int flags)
{
	const char *path = cell->route->path;

	if (cell->store == MADE_UP)
		return "synthetic";
	/* There is nothing to go around in memory. */
	if (cell->store == ON_SHM)
		return strcmp(path, "mapped") ? "cached" : path;
	return flags & SMALL && !strcmp(path, URING) ? THREADS : path;
}

static void check_route(const struct cell *cell, unsigned int flags)
{
	const char *path = path_of(cell, flags);
	bool gds = taken & path_bit("gds") && cell->gpu && !kit_fake_cuda();

	/* A real GPUDirect Storage is better than what the row names. */
	if (!(taken & path_bit(path)) && !gds) {
		fprintf(stderr, "no byte went by %s, which this cell is about; they went by", path);
		for (unsigned int i = 0; i < COUNT(path_names); i++)
			if (taken & 1u << i)
				fprintf(stderr, " %s", path_names[i]);
		fprintf(stderr, "\n");
		exit(1);
	}
	CHECK(!cell->route->no_uring || !(taken & path_bit(URING)));
}

/* What stands against this cell here, or NULL. */
static const char *obstacle(const struct cell *cell, unsigned int flags)
{
	const char *path = path_of(cell, flags);

	if (cell->store != ON_DISK || !strcmp(path, "cached") || !strcmp(path, "mapped"))
		return NULL;
	if (!kit_has_direct())
		return "the folder of TMPDIR knows no O_DIRECT";
	return !strcmp(path, URING) && !kit_has_uring() ? "there is no io_uring here" : NULL;
}

/* True if the cell ran and the case was about it. */
static bool run_cell(struct cell *cell, const struct shape *shape, unsigned int flags,
		     void (*run)(struct cell *))
{
	const char *why = obstacle(cell, flags);

	kit_at("%s, %s, %s", cell->device ? pen_device_name(cell->device) : "?",
	       cell->store == ON_DISK ? "disk" : cell->store == ON_SHM ? "tmpfs" : "pattern:",
	       cell->route->name);
	if (why) {
		kit_not_run("%s: %s", kit_where, why);
		return false;
	}
	name_objects(cell, shape);
	set_options(cell);
	if (cell->route->hot && shape->length)
		kit_warm(cell->name, shape->from, shape->length);
	cell->declined = false;
	taken = 0;
	run(cell);
	if (!cell->declined && !(flags & WITHOUT_REPORT))
		check_route(cell, flags);
	return !cell->declined;
}

/* Under the thread sanitizer only the cells that have threads of another kind. */
static bool slow(const struct cell *cell, size_t device)
{
	return KIT_TSAN && (device == 2 || cell->store == ON_SHM);
}

/* Run a case in every cell that has its stores, devices and directions (`flags`: and more). */
static void everywhere(unsigned int stores, unsigned int devices, unsigned int flags,
		       struct shape shape, void (*run)(struct cell *))
{
	static struct cell cell;
	unsigned int ran = 0;

	sys_fault_hook = forbid_uring;
	for (size_t d = 0; d < COUNT(device_names); d++) {
		cell.gpu = d != 0;
		if (!(devices & (cell.gpu ? TO_GPU : TO_HOST)))
			continue;
		cell.device = kit_device(device_names[d]);
		if (!cell.device)
			continue;
		OK(pen_device_alloc(cell.device, BED_SIZE, (void **)&cell.memory, &kit_err));
		cell.mirror = malloc(BED_SIZE);
		CHECK(cell.mirror);
		for (size_t r = 0; r < COUNT(routes); r++) {
			cell.route = &routes[r];
			if (!(cell.route->devices & (cell.gpu ? TO_GPU : TO_HOST)) ||
			    !(cell.route->directions & flags))
				continue;
			/* A sample is enough to see devices confused. */
			if (d == 2 && r % 3)
				continue;
			for (cell.store = ON_DISK; cell.store <= MADE_UP; cell.store <<= 1)
				if (cell.store & stores & cell.route->stores && !slow(&cell, d))
					ran += run_cell(&cell, &shape, flags, run);
		}
		free(cell.mirror);
		OK(pen_device_free(cell.device, cell.memory, BED_SIZE, &kit_err));
		pen_device_close(cell.device);
	}
	kit_at("after the matrix");
	printf("%u cells\n", ran);
	if (!ran)
		SKIP("no cell of this case can run here");
}

#define PATTERNED(size) ((struct shape){ (size), 0, (size) })

/* ------------------------------------------------------------------------------- one cell -- */

static void check_report(const struct cell *cell, const struct pen_report *report, uint64_t bytes)
{
	uint64_t limit = cell->options.memory_limit ? cell->options.memory_limit : 128 * MIB;
	uint64_t sum = 0;

	CHECK_EQ(report->bytes, bytes);
	for (uint32_t i = 0; i < report->path_count; i++) {
		sum += report->paths[i].bytes;
		CHECK(report->paths[i].path[0] && report->paths[i].reason[0]);
	}
	CHECK_EQ(sum, bytes);
	for (uint32_t i = 0; i < report->refused_count; i++)
		CHECK(report->refused[i].path[0] && report->refused[i].reason[0]);
	CHECK(!bytes == !report->requests);
	CHECK(report->pinned_bytes <= limit);
	CHECK(report->latency_us_p50 <= report->latency_us_max);
	CHECK_TEXT(report->device, pen_device_name(cell->device));
	note_paths(report);
}

/* A transfer that must work. */
static void transfer(struct cell *cell, enum pen_mode direction, const struct pen_extent *extents,
		     size_t count)
{
	uint64_t bytes = 0;

	for (size_t i = 0; i < count; i++)
		bytes += extents[i].length * (extents[i].rows > 1 ? extents[i].rows : 1);
	if (direction == PEN_READ && !cell->route->hot && cell->store != MADE_UP)
		kit_cool(cell->name, 0, 0);
	cell->report = (struct pen_report)PEN_REPORT_INIT;
	OK(pen_transfer(direction, cell->device, extents, count, &cell->options, &cell->report,
			&kit_err));
	check_report(cell, &cell->report, bytes);
}

/* Cover the first `used` bytes of the device's memory with guard bytes. */
static void make_bed(struct cell *cell, uint64_t used)
{
	CHECK(used <= BED_SIZE);
	memset(cell->mirror, GUARD_BYTE, used);
	OK(pen_device_put(cell->device, cell->memory, cell->mirror, used, &kit_err));
}

static void fetch_bed(struct cell *cell, uint64_t used)
{
	OK(pen_device_get(cell->device, cell->mirror, cell->memory, used, &kit_err));
}

static void check_guard(struct cell *cell, uint64_t from, uint64_t to)
{
	const unsigned char *guard = cell->mirror + from;

	/* Its first byte is right, and each byte is like the one before. */
	if (from == to || (*guard == GUARD_BYTE && !memcmp(guard, guard + 1, to - from - 1)))
		return;
	fprintf(stderr, "the guard [%llu, %llu) was written to\n", (unsigned long long)from,
		(unsigned long long)to);
	exit(1);
}

static void check_pattern(struct cell *cell, uint64_t at, uint64_t length, uint64_t offset)
{
	size_t good = pattern_check(cell->mirror + at, length, offset);

	if (good == length)
		return;
	fprintf(stderr, "byte %llu of the object is wrong in memory at %llu\n",
		(unsigned long long)(offset + good), (unsigned long long)(at + good));
	exit(1);
}

static struct pen_object *open_source(struct cell *cell)
{
	struct pen_object *object;

	OK(pen_object_open(cell->name, PEN_READ, 0, &object, &kit_err));
	return object;
}

static void read_and_check(struct cell *cell, struct pen_object *object, uint64_t offset,
			   uint64_t length, unsigned int shift)
{
	uint64_t start = GUARD + shift, used = start + length + GUARD;
	struct pen_extent extent = {
		.object = object, .offset = offset, .length = length,
		.memory = cell->memory + start,
	};

	make_bed(cell, used);
	transfer(cell, PEN_READ, &extent, 1);
	fetch_bed(cell, used);
	check_guard(cell, 0, start);
	check_pattern(cell, start, length, offset);
	check_guard(cell, start + length, used);
}

/* Device memory at `at` holds the pattern of [offset, offset + length). */
static void put_pattern(struct cell *cell, uint64_t at, uint64_t length, uint64_t offset)
{
	CHECK(at + length <= BED_SIZE);
	pattern_fill(cell->mirror, length, offset);
	OK(pen_device_put(cell->device, cell->memory + at, cell->mirror, length, &kit_err));
}

static struct pen_object *open_target(struct cell *cell, enum pen_mode mode, uint64_t size)
{
	struct pen_object *object;

	if (cell->store == MADE_UP)
		snprintf(cell->target, sizeof(cell->target), "pattern:%llu",
			 (unsigned long long)size);
	OK(pen_object_open(cell->target, mode, size, &object, &kit_err));
	return object;
}

static void commit(struct cell *cell, struct pen_object *object, uint64_t size)
{
	OK(pen_object_commit(object, &kit_err));
	pen_object_close(object);
	/* A pattern: object has checked what it was given. */
	if (cell->store != MADE_UP)
		CHECK(kit_holds(cell->target, size));
}

static void write_and_check(struct cell *cell, uint64_t length, unsigned int shift)
{
	struct pen_object *object = open_target(cell, PEN_WRITE, length);
	struct pen_extent extent = {
		.object = object, .length = length, .memory = cell->memory + GUARD + shift,
	};

	put_pattern(cell, GUARD + shift, length, 0);
	transfer(cell, PEN_WRITE, &extent, 1);
	commit(cell, object, length);
}

/* ------------------------------------------------------------------------- sizes and places -- */

static const uint64_t sizes[] = {
	0, 1, 511, 512, 513, 4095, 4096, 4097, MIB - 1, MIB, MIB + 1, 4 * MIB - 1, 4 * MIB,
	4 * MIB + 1, 9 * MIB + 17,
};

static void read_every_size(struct cell *cell)
{
	struct pen_object *object = open_source(cell);

	for (size_t i = KIT_TSAN ? 2 : 0; i < COUNT(sizes); i += KIT_TSAN ? 3 : 1)
		read_and_check(cell, object, 0, sizes[i], 0);
	pen_object_close(object);
}

TEST(reads_of_every_size_arrive_whole)
{
	everywhere(ANYWHERE, TO_ANY, READS, PATTERNED(9 * MIB + 17), read_every_size);
}

static void read_ragged(struct cell *cell)
{
	static const struct {
		uint64_t offset, length;
		unsigned int shift;
	} places[] = {
		{ 1, 1, 0 }, { 1, 4096, 1 }, { 511, 513, 7 }, { 512, 512, 64 }, { 4095, 2, 3 },
		{ 4097, 8191, 511 }, { MIB - 1, 2, 9 }, { 1000, 4 * MIB - 400, 0 },
		{ 4096, 5 * MIB, 1 }, { 1234567, 6 * MIB + 89, 4095 }, { 9 * MIB + 16, 1, 5 },
	};
	struct pen_object *object = open_source(cell);

	for (size_t i = 0; i < COUNT(places); i += KIT_TSAN ? 3 : 1)
		read_and_check(cell, object, places[i].offset, places[i].length, places[i].shift);
	pen_object_close(object);
}

TEST(reads_from_ragged_offsets_into_ragged_memory)
{
	everywhere(ANYWHERE, TO_ANY, READS, PATTERNED(9 * MIB + 17), read_ragged);
}

static void read_with_full_requests(struct cell *cell)
{
	struct pen_object *object;

	cell->declined = cell->options.memory_limit || placed(cell);
	if (cell->declined)
		return;
	object = open_source(cell);
	/* The blocks around both ends make it larger than a piece of staging memory. */
	cell->options.request_size = 4 * MIB;
	read_and_check(cell, object, 1000, 4 * MIB - 400, 1);
	read_and_check(cell, object, 4097, 8 * MIB, 1);
	pen_object_close(object);
}

TEST(requests_that_grow_by_their_alignment_still_fit)
{
	everywhere(ANYWHERE, TO_ANY, READS, PATTERNED(9 * MIB + 17), read_with_full_requests);
}

static void write_every_size(struct cell *cell)
{
	for (size_t i = KIT_TSAN ? 2 : 0; i < COUNT(sizes); i += KIT_TSAN ? 3 : 1)
		write_and_check(cell, sizes[i], i % 2 ? 0 : 13);
	kit_unlink(cell->target);
}

TEST(writes_of_every_size_are_committed_whole)
{
	everywhere(ANYWHERE, TO_ANY, WRITES, PATTERNED(0), write_every_size);
}

/* A file of other bytes in which only a stretch is overwritten. */
static void write_in_place(struct cell *cell)
{
	static const struct {
		uint64_t offset, length, size;
	} places[] = {
		{ 1, 1, 4097 }, { 511, 2, 1024 }, { 4095, 4098, MIB }, { 5000, MIB + 3, 2 * MIB },
		{ MIB - 7, 14, MIB + 7 }, { 0, 4096, MIB }, { 8192, 2 * MIB, 3 * MIB },
		{ 4097, 5 * MIB, 6 * MIB }, { 0, 5 * MIB, 5 * MIB },
	};

	for (size_t i = 0; i < COUNT(places); i++) {
		uint64_t offset = places[i].offset, length = places[i].length;
		uint64_t size = places[i].size;
		struct pen_extent extent = {
			.offset = offset, .length = length, .memory = cell->memory + 3,
		};
		int fd;

		put_pattern(cell, 3, length, offset);
		kit_unlink(cell->target);
		kit_write(cell->target, 0, size, GUARD_BYTE);
		extent.object = open_target(cell, PEN_WRITE_IN_PLACE, size);
		transfer(cell, PEN_WRITE_IN_PLACE, &extent, 1);
		OK(pen_object_commit(extent.object, &kit_err));
		pen_object_close(extent.object);
		fd = open(cell->target, O_RDONLY | O_CLOEXEC);
		CHECK_EQ(pread(fd, cell->mirror, size + 1, 0), size);
		close(fd);
		check_guard(cell, 0, offset);
		check_pattern(cell, offset, length, offset);
		check_guard(cell, offset + length, size);
	}
	kit_unlink(cell->target);
}

TEST(writes_in_place_touch_only_their_bytes)
{
	everywhere(FILES, TO_ANY, WRITES, PATTERNED(0), write_in_place);
}

static void read_past_4_gib(struct cell *cell)
{
	struct pen_object *object = open_source(cell);
	struct pen_extent hole = {
		.object = object, .offset = GIB + 5, .length = 100000,
		.memory = cell->memory + GUARD,
	};

	CHECK_EQ(pen_object_size(object), 5 * GIB + 3);
	read_and_check(cell, object, 4 * GIB - MIB + 3, 9 * MIB, 0);
	read_and_check(cell, object, 4 * GIB, 4096, 0);
	if (cell->store != MADE_UP) {
		make_bed(cell, GUARD + 100000 + GUARD);
		transfer(cell, PEN_READ, &hole, 1);
		fetch_bed(cell, GUARD + 100000 + GUARD);
		check_guard(cell, 0, GUARD);
		for (int i = 0; i < 100000; i++)
			CHECK(!cell->mirror[GUARD + i]);
		check_guard(cell, GUARD + 100000, GUARD + 100000 + GUARD);
	}
	pen_object_close(object);
}

TEST(bytes_beyond_4_gib_come_from_the_right_place)
{
	struct shape sparse = { 5 * GIB + 3, 4 * GIB - MIB, 10 * MIB };

	everywhere(ANYWHERE, TO_ANY, READS, sparse, read_past_4_gib);
}

/* --------------------------------------------------------------------------- many extents -- */

#define PARTS 700

/* Small extents with holes between, in an order of their own, packed with guards in memory. */
static void scatter(struct cell *cell)
{
	static struct pen_extent parts[PARTS + 1];
	struct pen_object *object = open_source(cell);
	uint64_t offset = 5, at = 0;

	for (unsigned int i = 0; i < PARTS; i++) {
		unsigned int place = i * 311 % PARTS;	/* coprime: every place once */

		parts[place] = (struct pen_extent){
			.object = object, .offset = offset, .length = 1 + i * 37 % 600,
			.memory = cell->memory + at + 1 + i % 3,
		};
		at += 1 + i % 3 + parts[place].length;
		offset += parts[place].length + (i % 50 ? i % 7 * 40 : 100 * KIB);
	}
	/* And a large one, with which all of it is worth a ring. */
	parts[PARTS] = (struct pen_extent){
		.object = object, .offset = 4 * MIB, .length = 5 * MIB,
		.memory = cell->memory + at + 1,
	};
	CHECK(offset < 4 * MIB);
	at += 1 + 5 * MIB;
	make_bed(cell, at + GUARD);
	transfer(cell, PEN_READ, parts, PARTS + 1);
	fetch_bed(cell, at + GUARD);
	for (unsigned int i = 0; i <= PARTS; i++) {
		uint64_t start = (uint64_t)((unsigned char *)parts[i].memory - cell->memory);

		check_guard(cell, start - 1, start);
		check_pattern(cell, start, parts[i].length, parts[i].offset);
	}
	check_guard(cell, at, at + GUARD);
	/* Neighbours were merged: far fewer requests than extents. */
	if (!placed(cell) && !cell->options.request_size)
		CHECK(cell->report.requests < PARTS / 10);
	pen_object_close(object);
}

TEST(scattered_small_extents_share_their_reads)
{
	everywhere(ANYWHERE, TO_ANY, READS, PATTERNED(9 * MIB + 17), scatter);
}

/* Small sources, anywhere in memory, that make up one object. */
static void gather(struct cell *cell)
{
	static struct pen_extent parts[PARTS];
	uint64_t size = 0, at = 0;

	/* cuFile writes whole blocks: sources that meet inside one are refused there. */
	for (unsigned int i = 0; i < PARTS; i++)
		size += parts[i].length = placed(cell) ? 4096 * (1 + i % 3) : 1 + i * 2371 % 16000;
	memset(cell->mirror, GUARD_BYTE, size + PARTS);
	for (unsigned int i = 0, offset = 0; i < PARTS; i++) {
		parts[i].offset = offset;
		parts[i].memory = cell->memory + at;
		pattern_fill(cell->mirror + at, parts[i].length, offset);
		offset += parts[i].length;
		at += parts[i].length + 1;
	}
	OK(pen_device_put(cell->device, cell->memory, cell->mirror, size + PARTS, &kit_err));
	parts[0].object = open_target(cell, PEN_WRITE, size);
	for (unsigned int i = 1; i < PARTS; i++)
		parts[i].object = parts[0].object;
	transfer(cell, PEN_WRITE, parts, PARTS);
	if (!placed(cell) && !cell->options.request_size)
		CHECK(cell->report.requests < PARTS / 10);
	commit(cell, parts[0].object, size);
	kit_unlink(cell->target);
}

TEST(gathered_sources_make_one_object)
{
	everywhere(ANYWHERE, TO_ANY, WRITES, PATTERNED(0), gather);
}

static const struct {
	uint64_t offset, length, rows, object_pitch, memory_pitch;
} slices[] = {
	{ 3, 1234, 900, 5000, 1300 },		/* many rows in one request */
	{ 0, 4096, 64, 8192, 4096 },		/* dense in memory */
	{ 77, 700001, 12, 700011, 700005 },	/* rows that cross requests */
	{ MIB - 10, 20, 8, MIB, 33 },		/* each row astride a request's end */
	{ 9, 65536, 3, 2 * MIB, 65536 },	/* rows further apart than the gap limit */
};

static void read_slices(struct cell *cell)
{
	struct pen_object *object = open_source(cell);

	for (size_t i = 0; i < COUNT(slices); i++) {
		uint64_t pitch = slices[i].memory_pitch, length = slices[i].length, start = GUARD;
		uint64_t used = GUARD + slices[i].rows * pitch + GUARD;
		struct pen_extent slice = {
			.object = object, .offset = slices[i].offset, .length = length,
			.rows = slices[i].rows, .object_pitch = slices[i].object_pitch,
			.memory_pitch = pitch, .memory = cell->memory + GUARD,
		};

		make_bed(cell, used);
		transfer(cell, PEN_READ, &slice, 1);
		fetch_bed(cell, used);
		check_guard(cell, 0, GUARD);
		for (uint64_t row = 0; row < slice.rows; row++, start += pitch) {
			check_pattern(cell, start, length, slice.offset + row * slice.object_pitch);
			check_guard(cell, start + length, start + pitch);
		}
		check_guard(cell, start, used);
	}
	pen_object_close(object);
}

TEST(strided_slices_are_read_row_by_row)
{
	everywhere(ANYWHERE, TO_ANY, READS, PATTERNED(9 * MIB + 17), read_slices);
}

/* Two column blocks side by side, each with a pitch of its own, make a whole object. */
static void write_columns(struct cell *cell)
{
	static const struct {
		uint64_t rows, pitch, left;
	} tables[] = { { 128, 8192, 4096 }, { 500, 3000, 1000 }, { 9, 700001, 300000 } };

	/* cuFile writes whole blocks: only the first table's columns meet at a block's end. */
	for (size_t i = 0; i < (placed(cell) ? 1 : COUNT(tables)); i++) {
		uint64_t rows = tables[i].rows, pitch = tables[i].pitch, left = tables[i].left;
		uint64_t right = pitch - left, second = rows * (left + 7) + 5;
		struct pen_object *object = open_target(cell, PEN_WRITE, rows * pitch);
		struct pen_extent columns[] = {
			{ object, left, cell->memory + second, right, rows, pitch, right + 1 },
			{ object, 0, cell->memory, left, rows, pitch, left + 7 },
		};

		for (uint64_t row = 0; row < rows; row++) {
			pattern_fill(cell->mirror + row * (left + 7), left, row * pitch);
			pattern_fill(cell->mirror + second + row * (right + 1), right,
				     row * pitch + left);
		}
		OK(pen_device_put(cell->device, cell->memory, cell->mirror,
				  second + rows * (right + 1), &kit_err));
		transfer(cell, PEN_WRITE, columns, 2);
		commit(cell, object, rows * pitch);
	}
	kit_unlink(cell->target);
}

TEST(strided_slices_are_written_row_by_row)
{
	everywhere(ANYWHERE, TO_ANY, WRITES, PATTERNED(0), write_columns);
}

static void move_nothing(struct cell *cell)
{
	struct pen_object *object = open_source(cell);
	struct pen_extent extents[] = {
		{ .object = object, .offset = 9, .memory = cell->memory },
		{ .object = object, .offset = 100, .memory = cell->memory + GUARD, .length = 7 },
		{ .object = object, .offset = 102, .memory = NULL },
		{ .object = object, .offset = pen_object_size(object), .rows = 5 },
	};

	make_bed(cell, 3 * GUARD);
	transfer(cell, PEN_READ, extents, 4);
	fetch_bed(cell, 3 * GUARD);
	check_guard(cell, 0, GUARD);
	check_pattern(cell, GUARD, 7, 100);
	check_guard(cell, GUARD + 7, 3 * GUARD);
	transfer(cell, PEN_READ, extents, 1);
	transfer(cell, PEN_READ, extents, 0);
	pen_object_close(object);
}

TEST(extents_of_no_length_move_nothing)
{
	everywhere(ANYWHERE, TO_ANY, READS | SMALL, PATTERNED(9 * MIB + 17), move_nothing);
}

static void read_overlapping(struct cell *cell)
{
	struct pen_object *object = open_source(cell);
	static const struct {
		uint64_t offset, length;
	} stretches[] = {
		{ 0, 3 * MIB }, { MIB + 1, MIB }, { 5, 100 }, { 5, 100 }, { 2 * MIB - 3, 5 * MIB },
		{ 0, 1 }, { 6 * MIB, 4097 },
	};
	struct pen_extent extents[COUNT(stretches)];
	uint64_t at = GUARD;

	for (size_t i = 0; i < COUNT(stretches); i++) {
		extents[i] = (struct pen_extent){
			.object = object, .offset = stretches[i].offset,
			.length = stretches[i].length, .memory = cell->memory + at,
		};
		at += stretches[i].length + 11;
	}
	make_bed(cell, at + GUARD);
	transfer(cell, PEN_READ, extents, COUNT(extents));
	fetch_bed(cell, at + GUARD);
	at = GUARD;
	for (size_t i = 0; i < COUNT(stretches); i++) {
		check_pattern(cell, at, stretches[i].length, stretches[i].offset);
		at += stretches[i].length;
		check_guard(cell, at, at + 11);
		at += 11;
	}
	pen_object_close(object);
}

TEST(overlapping_reads_each_get_their_bytes)
{
	everywhere(ANYWHERE, TO_ANY, READS, PATTERNED(9 * MIB + 17), read_overlapping);
}

/* ------------------------------------------------------------------------------- refusals -- */

/* What must be refused before any I/O: the memory stays as it was and no job exists. */
static void refuse(struct cell *cell)
{
	uint64_t size = 9 * MIB + 17;
	struct pen_object *source = open_source(cell);
	struct pen_object *target = open_target(cell, PEN_WRITE, MIB);
	unsigned char *memory = cell->memory;
	const struct {
		enum pen_mode direction;
		int code;
		struct pen_extent extents[2];
	} table[] = {
		{ PEN_READ, -ERANGE, { { source, size, memory, 1 } } },
		{ PEN_READ, -ERANGE, { { source, 1, memory, size } } },
		{ PEN_READ, -ERANGE, { { source, 0, memory, 1, 2, size, 1 } } },
		{ PEN_READ, -EOVERFLOW, { { source, UINT64_MAX, memory, 1 } } },
		{ PEN_READ, -EOVERFLOW, { { source, UINT64_MAX - 5, memory, 10 } } },
		{ PEN_READ, -EOVERFLOW, { { source, (uint64_t)INT64_MAX, memory, 1 } } },
		{ PEN_READ, -EOVERFLOW, { { source, 0, memory, UINT64_MAX } } },
		{ PEN_READ, -EOVERFLOW, { { source, 0, memory, 8, UINT64_MAX, 8, 8 } } },
		{ PEN_READ, -EOVERFLOW, { { source, 0, memory, 8, 1 << 30, 8, UINT64_MAX / 4 } } },
		{ PEN_READ, -EINVAL, { { source, 0, memory, 8, 2, 7, 8 } } },
		{ PEN_READ, -EINVAL, { { source, 0, memory, 8, 2, 8, 7 } } },
		{ PEN_READ, -EINVAL, { { NULL, 0, memory, 8 } } },
		{ PEN_READ, -EFAULT, { { source, 0, NULL, 8 } } },
		{ PEN_READ, -EBADF, { { target, 0, memory, 8 } } },
		{ PEN_WRITE, -EBADF, { { source, 0, memory, 8 } } },
		{ PEN_WRITE, -ERANGE, { { target, MIB, memory, 1 } } },
		{ PEN_WRITE, -EINVAL, { { target, 0, memory, 9 }, { target, 8, memory, 9 } } },
		{ PEN_WRITE, -EINVAL, { { target, 4096, memory, 4096 },
					{ target, 0, memory, 8192 } } },
		{ PEN_WRITE, -EINVAL, { { target, 5, memory, 1 }, { target, 5, memory, 1 } } },
		{ PEN_WRITE, -EINVAL, { { target, 0, memory, 9, 3, 18, 9 },
					{ target, 20, memory, 2 } } },
	};

	make_bed(cell, MIB);
	for (size_t i = 0; i < COUNT(table); i++) {
		size_t count = table[i].extents[1].object ? 2 : 1;
		struct pen_job *job;

		if (table[i].direction != PEN_READ && !(cell->route->directions & WRITES))
			continue;
		REFUSED(table[i].code, pen_job_start(table[i].direction, cell->device,
						     table[i].extents, count, &cell->options, &job,
						     &kit_err));
		CHECK(!job);
	}
	fetch_bed(cell, MIB);
	check_guard(cell, 0, MIB);
	pen_object_close(target);
	pen_object_close(source);
	if (cell->store != MADE_UP)
		CHECK(access(cell->target, F_OK) != 0);
}

TEST(nonsense_is_refused_before_any_io)
{
	everywhere(ANYWHERE, TO_ANY, READS | WITHOUT_REPORT, PATTERNED(9 * MIB + 17), refuse);
}

TEST(options_that_make_no_sense_are_refused)
{
	struct pen_device *host = kit_device("host");
	struct pen_object *object;
	static unsigned char memory[4096];
	const struct pen_options table[] = {
		{ .size = 0 },
		{ .size = sizeof(table[0]), .transfer = 10 },
		{ .size = sizeof(table[0]), .transfer = -1 },
		{ .size = sizeof(table[0]), .transfer = PEN_AUTO, .cache = 5 },
		{ .size = sizeof(table[0]), .transfer = PEN_AUTO, .memory_limit = 64 * KIB - 1 },
		{ .size = sizeof(table[0]), .transfer = PEN_AUTO, .memory_limit = 1 },
		{ .size = sizeof(table[0]), .transfer = PEN_AUTO, .request_size = 1000 },
		{ .size = sizeof(table[0]), .transfer = PEN_AUTO, .request_size = 2048 },
		{ .size = sizeof(table[0]), .transfer = PEN_AUTO, .request_size = 2 * GIB },
		{ .size = sizeof(table[0]), .transfer = PEN_AUTO, .memory_limit = MIB,
		  .request_size = 2 * MIB },
		{ .size = sizeof(table[0]), .transfer = PEN_AUTO, .lanes = 65 },
		{ .size = sizeof(table[0]), .transfer = PEN_AUTO, .inject = "nonsense" },
		{ .size = sizeof(table[0]), .transfer = PEN_AUTO, .inject = "fail:0" },
	};

	OK(pen_object_open("pattern:4K", PEN_READ, 0, &object, &kit_err));
	for (size_t i = 0; i < COUNT(table); i++) {
		struct pen_extent extent = { .object = object, .memory = memory, .length = 4096 };

		kit_at("row %zu", i);
		REFUSED(-EINVAL, pen_transfer(PEN_READ, host, &extent, 1, &table[i], NULL,
					      &kit_err));
	}
	pen_object_close(object);
	pen_device_close(host);
}

TEST(types_that_cannot_be_had_are_refused_with_the_nearest)
{
	struct pen_device *host = kit_device("host"), *gpu = kit_device("cuda:0");
	static unsigned char memory[4096];
	struct pen_object *object, *target;
	void *there = NULL;

	if (!gpu)
		SKIP("there is no GPU, not even a fake one");
	OK(pen_device_alloc(gpu, 4096, &there, &kit_err));
	OK(pen_object_open("pattern:4K", PEN_READ, 0, &object, &kit_err));
	OK(pen_object_open("pattern:4K", PEN_WRITE, 4096, &target, &kit_err));
	for (int type = PEN_GPU_DIRECT; type <= PEN_MAPPED; type++) {
		struct pen_options options = { .size = sizeof(options), .transfer = type };
		struct pen_extent extent = { .object = object, .memory = memory, .length = 4096 };
		bool staged = type >= PEN_CPU_GPU && type <= PEN_CPU_CACHED_GPU;

		kit_at("type %d", type);
		if (type != PEN_CPU_ONLY) {
			REFUSED(-ENOTSUP, pen_transfer(PEN_READ, host, &extent, 1, &options, NULL,
						       &kit_err));
			CHECK(strstr(kit_err.hint, "CPU_ONLY") != NULL);
		}
		extent.memory = there;
		if (!staged) {
			REFUSED(-ENOTSUP, pen_transfer(PEN_READ, gpu, &extent, 1, &options, NULL,
						       &kit_err));
			CHECK(strstr(kit_err.hint, "nearest") != NULL);
		}
	}
	pen_object_close(target);
	pen_object_close(object);
	OK(pen_device_free(gpu, there, 4096, &kit_err));
	pen_device_close(gpu);
	pen_device_close(host);
}

static void commit_once(struct cell *cell)
{
	struct pen_object *object = open_target(cell, PEN_WRITE, 5000);
	struct pen_extent extent = { .object = object, .length = 5000, .memory = cell->memory };

	put_pattern(cell, 0, 5000, 0);
	transfer(cell, PEN_WRITE, &extent, 1);
	OK(pen_object_commit(object, &kit_err));
	REFUSED(-EALREADY, pen_object_commit(object, &kit_err));
	REFUSED(-EBADF, pen_transfer(PEN_WRITE, cell->device, &extent, 1, &cell->options, NULL,
				     &kit_err));
	pen_object_close(object);
	if (cell->store == MADE_UP)
		return;
	CHECK(kit_holds(cell->target, 5000));
	/* Without a commit nothing changes, and nothing is left. */
	extent.object = object = open_target(cell, PEN_WRITE, 100);
	extent.length = 100;
	transfer(cell, PEN_WRITE, &extent, 1);
	pen_object_close(object);
	CHECK(kit_holds(cell->target, 5000));
	kit_unlink(cell->target);
	CHECK_EQ(kit_list(kit_folder(cell->store == ON_SHM ? SHM : DISK), NULL), 0);
}

TEST(a_write_counts_only_when_committed_and_only_once)
{
	everywhere(ANYWHERE, TO_ANY, WRITES | SMALL, PATTERNED(0), commit_once);
}

/* --------------------------------------------------------------------------------- faults -- */

/* Requests must be many and small, so that the n-th exists. */
static void small_requests(struct cell *cell, const char *inject)
{
	cell->options.inject = inject;
	cell->options.request_size = 256 * KIB;
}

static void survive_short(struct cell *cell)
{
	static const char *const rules[] = {
		"short:1", "short:3:1", "short:2:4096", "short:50%:777", "short:20%",
		"short:*:65536",
	};
	struct pen_object *object;

	/* A lent buffer is all there or not at all. */
	cell->declined = cell->route->transfer == PEN_MAPPED;
	if (cell->declined)
		return;
	object = open_source(cell);
	for (size_t i = 0; i < COUNT(rules); i += KIT_TSAN ? 2 : 1) {
		small_requests(cell, rules[i]);
		read_and_check(cell, object, 4096, 5 * MIB, 0);
		CHECK(cell->report.retries > 0);
		read_and_check(cell, object, 1003, 5 * MIB + 1, 5);
	}
	pen_object_close(object);
}

TEST(short_reads_are_completed)
{
	everywhere(ANYWHERE, TO_ANY, READS, PATTERNED(9 * MIB + 17), survive_short);
}

static void survive_short_writes(struct cell *cell)
{
	static const char *const rules[] = {
		"short:1", "short:2:1", "short:30%:4096", "short:2:777",
	};

	for (size_t i = 0; i < COUNT(rules); i++) {
		small_requests(cell, rules[i]);
		write_and_check(cell, 4 * MIB + 1234, 0);
		CHECK(cell->report.retries > 0);
	}
	kit_unlink(cell->target);
}

TEST(short_writes_are_completed)
{
	everywhere(ANYWHERE, TO_ANY, WRITES, PATTERNED(0), survive_short_writes);
}

static void retry(struct cell *cell)
{
	static const char *const rules[] = {
		"fail:1", "fail:3:EAGAIN", "fail:10%:EINTR", "fail:5:EIO",
	};
	struct pen_object *object = open_source(cell);

	for (size_t i = 0; i < COUNT(rules); i += KIT_TSAN ? 2 : 1) {
		small_requests(cell, rules[i]);
		read_and_check(cell, object, 0, 9 * MIB, 0);
		CHECK(cell->report.retries > 0 || cell->report.refused_count > 0);
	}
	pen_object_close(object);
}

TEST(passing_errors_are_retried_and_counted)
{
	everywhere(ANYWHERE, TO_ANY, READS, PATTERNED(9 * MIB + 17), retry);
}

static void give_up(struct cell *cell)
{
	static const struct {
		const char *rule;
		int code;
	} rules[] = {
		{ "fail:2+", -EIO }, { "fail:1:ENXIO", -ENXIO }, { "fail:5:ENODEV", -ENODEV },
		{ "fail:3:ETIMEDOUT,delay:*:1ms", -ETIMEDOUT },
	};
	struct pen_object *object = open_source(cell);
	struct pen_extent extent = {
		.object = object, .length = 5 * MIB, .memory = cell->memory + GUARD,
	};

	/* A failed job need not say how it went; the same one that works does. */
	small_requests(cell, NULL);
	read_and_check(cell, object, 0, 5 * MIB, 0);
	for (size_t i = 0; i < COUNT(rules); i++) {
		struct pen_report report = PEN_REPORT_INIT;

		kit_part("%s", rules[i].rule);
		small_requests(cell, rules[i].rule);
		if (!cell->route->hot && cell->store != MADE_UP)
			kit_cool(cell->name, 0, 0);
		make_bed(cell, GUARD + 5 * MIB + GUARD);
		REFUSED(rules[i].code, pen_transfer(PEN_READ, cell->device, &extent, 1,
						    &cell->options, &report, &kit_err));
		CHECK(kit_err.offset >= 0 && kit_err.offset < (int64_t)(5 * MIB));
		CHECK(kit_err.object[0]);
		CHECK(report.bytes < 5 * MIB);
		CHECK_TEXT(report.device, pen_device_name(cell->device));
		fetch_bed(cell, GUARD + 5 * MIB + GUARD);
		check_guard(cell, 0, GUARD);
		check_guard(cell, GUARD + 5 * MIB, GUARD + 5 * MIB + GUARD);
	}
	pen_object_close(object);
}

TEST(lasting_errors_end_the_job_with_words_and_an_offset)
{
	everywhere(ANYWHERE, TO_ANY, READS, PATTERNED(9 * MIB + 17), give_up);
}

static void fail_a_write(struct cell *cell)
{
	struct pen_object *object;
	struct pen_extent extent = { .length = 5 * MIB, .memory = cell->memory };

	/* A failed job need not say how it went; the same one that works does. */
	small_requests(cell, NULL);
	write_and_check(cell, 5 * MIB, 0);
	kit_unlink(cell->target);
	put_pattern(cell, 0, 5 * MIB, 0);
	if (cell->store != MADE_UP)
		kit_pattern(cell->target, 1000);
	extent.object = object = open_target(cell, PEN_WRITE, 5 * MIB);
	small_requests(cell, "fail:3+:ENOSPC");
	REFUSED(-ENOSPC, pen_transfer(PEN_WRITE, cell->device, &extent, 1, &cell->options, NULL,
				      &kit_err));
	pen_object_close(object);
	if (cell->store == MADE_UP)
		return;
	CHECK(kit_holds(cell->target, 1000));
	kit_unlink(cell->target);
	CHECK_EQ(kit_list(kit_folder(cell->store == ON_SHM ? SHM : DISK), NULL), 0);
}

TEST(a_failed_write_leaves_the_old_file_and_no_litter)
{
	everywhere(ANYWHERE, TO_ANY, WRITES, PATTERNED(0), fail_a_write);
}

static void come_late(struct cell *cell)
{
	struct pen_object *object = open_source(cell);

	small_requests(cell, "delay:20%:2ms,delay:1:20ms");
	read_and_check(cell, object, 0, 5 * MIB, 0);
	pen_object_close(object);
}

TEST(late_completions_in_any_order_arrive_whole)
{
	everywhere(ANYWHERE, TO_ANY, READS, PATTERNED(9 * MIB + 17), come_late);
}

static void see_corruption(struct cell *cell)
{
	struct pen_object *object = open_source(cell);
	struct pen_extent extent = { .object = object, .length = 2 * MIB, .memory = cell->memory };

	/* A store that corrupts cannot be noticed by the engine, but it can by this suite. */
	cell->options.inject = "corrupt:1";
	transfer(cell, PEN_READ, &extent, 1);
	fetch_bed(cell, 2 * MIB);
	CHECK(pattern_check(cell->mirror, 2 * MIB, 0) < 2 * MIB);
	pen_object_close(object);
}

TEST(the_check_of_the_pattern_sees_one_flipped_bit)
{
	everywhere(MADE_UP, TO_ANY, READS, PATTERNED(9 * MIB), see_corruption);
}

/* ----------------------------------------------------------------------- a file that changes -- */

static void change(struct cell *cell)
{
	struct pen_extent extent = { .length = 3 * MIB, .memory = cell->memory };
	static const off_t ends[] = { 3 * MIB + 1, MIB + 1, 0 };
	bool mapped = cell->route->transfer == PEN_MAPPED;

	/* The driver refuses to register pages that are gone; the fake one does not know. */
	for (size_t i = 0; i < (mapped ? 1 : COUNT(ends)); i++) {
		int rc;

		kit_write(cell->target, 0, 3 * MIB, -1);
		CHECK_EQ(truncate(cell->target, 3 * MIB), 0);
		OK(pen_object_open(cell->target, PEN_READ, 0, &extent.object, &kit_err));
		CHECK_EQ(truncate(cell->target, ends[i]), 0);
		kit_part("cut to %lld", (long long)ends[i]);
		rc = pen_transfer(PEN_READ, cell->device, &extent, 1, &cell->options, NULL,
				  &kit_err);
		/* cuFile may find out first, in its own words. */
		CHECK(rc == -ESTALE || (rc < 0 && placed(cell)));
		CHECK(kit_err.message[0]);
		pen_object_close(extent.object);
	}
	kit_unlink(cell->target);
}

TEST(a_file_that_changes_during_the_read_is_reported)
{
	everywhere(FILES, TO_ANY, READS | WITHOUT_REPORT, PATTERNED(0), change);
}

/* ------------------------------------------------------------- watching, stopping, reporting -- */

static double seconds_now(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (double)ts.tv_sec + (double)ts.tv_nsec / 1e9;
}

static void *cancel_soon(void *job)
{
	usleep(20000);
	pen_job_cancel(job);
	return NULL;
}

/* A store that would need many seconds; cancelled from another thread after a moment. */
static void cancel(struct cell *cell)
{
	static const char *const slow[] = { "pattern:16M,rate=2M", "pattern:16M,latency=100ms" };

	/* What is in flight comes home before the end, so let it be little. */
	cell->options.request_size = 64 * KIB;
	cell->options.depth = 4;
	for (int i = 0; i < 4; i++) {
		enum pen_mode direction = i % 2 ? PEN_WRITE : PEN_READ;
		struct pen_report report = PEN_REPORT_INIT;
		struct pen_progress progress;
		struct pen_extent extent = { .length = 16 * MIB, .memory = cell->memory };
		double start = seconds_now();
		struct pen_job *job;
		pthread_t thread;

		if (direction == PEN_WRITE)
			put_pattern(cell, 0, 16 * MIB, 0);
		OK(pen_object_open(slow[i / 2], direction, 16 * MIB, &extent.object, &kit_err));
		OK(pen_job_start(direction, cell->device, &extent, 1, &cell->options, &job,
				 &kit_err));
		CHECK_EQ(pthread_create(&thread, NULL, cancel_soon, job), 0);
		do {
			usleep(1000);
			pen_job_poll(job, &progress);
		} while (progress.state == PEN_RUNNING);
		CHECK(progress.state == PEN_DRAINING || progress.state == PEN_CANCELLED);
		pthread_join(thread, NULL);
		REFUSED(-ECANCELED, pen_job_wait(job, &report, &kit_err));
		CHECK(report.bytes < 16 * MIB);
		CHECK(seconds_now() - start < 5.0);
		pen_object_close(extent.object);
	}
}

TEST_ALONE(a_job_can_be_cancelled_in_its_middle)
{
	everywhere(MADE_UP, TO_ANY, READS | WITHOUT_REPORT, PATTERNED(MIB), cancel);
}

static void cancel_files(struct cell *cell)
{
	struct pen_object *object = open_source(cell);
	struct pen_extent extent = { .object = object, .length = 9 * MIB, .memory = cell->memory };

	/* Held up by injected delays, cancelled at once or a moment later. */
	for (int i = 0; i < 6; i++) {
		struct pen_job *job;
		int rc;

		small_requests(cell, i % 2 ? "delay:*:3ms" : NULL);
		if (!cell->route->hot)
			kit_cool(cell->name, 0, 0);
		OK(pen_job_start(PEN_READ, cell->device, &extent, 1, &cell->options, &job,
				 &kit_err));
		if (i > 1)
			usleep((unsigned int)i * 300);
		pen_job_cancel(job);
		rc = pen_job_wait(job, NULL, &kit_err);
		CHECK(rc == -ECANCELED || !rc);
	}
	pen_object_close(object);
}

TEST(a_cancelled_job_over_a_file_brings_everything_home)
{
	everywhere(FILES, TO_ANY, READS | WITHOUT_REPORT, PATTERNED(9 * MIB + 17), cancel_files);
}

static void watch(struct cell *cell)
{
	struct pen_progress last = { 0 }, now = { 0 };
	struct pen_extent extent = { .length = 8 * MIB, .memory = cell->memory };
	struct pen_report report = PEN_REPORT_INIT;
	struct pen_job *job;

	OK(pen_object_open("pattern:8M,rate=80M", PEN_READ, 0, &extent.object, &kit_err));
	OK(pen_job_start(PEN_READ, cell->device, &extent, 1, &cell->options, &job, &kit_err));
	while (now.state != PEN_DONE) {
		pen_job_poll(job, &now);
		CHECK(now.state == PEN_RUNNING || now.state == PEN_DONE);
		CHECK_EQ(now.total, 8 * MIB);
		CHECK(now.bytes >= last.bytes && now.bytes <= now.total);
		CHECK(now.seconds >= last.seconds);
		last = now;
		usleep(500);
	}
	CHECK_EQ(now.bytes, 8 * MIB);
	OK(pen_job_wait(job, &report, &kit_err));
	check_report(cell, &report, 8 * MIB);
	pen_object_close(extent.object);
}

TEST(progress_only_grows_and_ends_at_the_total)
{
	everywhere(MADE_UP, TO_ANY, READS, PATTERNED(MIB), watch);
}

static void keep_the_promise(struct cell *cell)
{
	static const uint64_t limits[] = { 64 * KIB, 256 * KIB, MIB, 16 * MIB, 128 * MIB };
	struct pen_object *object = open_source(cell);

	for (size_t i = 0; i < COUNT(limits); i += KIT_TSAN ? 2 : 1) {
		kit_part("limit %llu", (unsigned long long)limits[i]);
		set_options(cell);
		cell->options.memory_limit = limits[i];
		cell->options.request_size = 0;
		read_and_check(cell, object, 777, 5 * MIB - 777, 1);
		cell->options.lanes = 16;
		read_and_check(cell, object, 0, 5 * MIB, 0);
		if (cell->route->directions & WRITES)
			write_and_check(cell, 5 * MIB + 5, 1);
	}
	pen_object_close(object);
	kit_unlink(cell->target);
}

TEST_SLOW(staging_memory_never_exceeds_the_promise)
{
	everywhere(ANYWHERE, TO_ANY, READS, PATTERNED(9 * MIB + 17), keep_the_promise);
}

static void leave_the_cache(struct cell *cell)
{
	struct pen_object *object = open_source(cell);
	uint64_t resident = 0;

	/* cuFile cannot leave anything in the page cache, and says so. */
	cell->options.cache = PEN_CACHE_KEEP;
	if (placed(cell)) {
		struct pen_extent extent = {
			.object = object, .length = 9 * MIB, .memory = cell->memory,
		};

		REFUSED(-ENOTSUP, pen_transfer(PEN_READ, cell->device, &extent, 1, &cell->options,
					       NULL, &kit_err));
	} else {
		/* Somebody else may throw all caches out at that moment. */
		for (int tries = 0; resident < 9 * MIB && tries < 5; tries++) {
			read_and_check(cell, object, 0, 9 * MIB, 0);
			OK(object_residency(object, 0, 9 * MIB, &resident, &kit_err));
		}
		CHECK_EQ(resident, 9 * MIB);
	}
	cell->options.cache = PEN_CACHE_DROP;
	read_and_check(cell, object, 0, 9 * MIB, 0);
	pen_object_close(object);
}

TEST(every_cache_policy_gives_the_same_bytes)
{
	everywhere(FILES, TO_ANY, READS, PATTERNED(9 * MIB + 17), leave_the_cache);
}

/* Bytes of a file in the page cache, as the engine's own survey tells. */
static uint64_t cached_bytes(const char *path)
{
	struct pen_device *host = kit_device("host");
	struct pen_explanation *explanation;
	struct pen_object *object;
	uint64_t resident;

	OK(pen_object_open(path, PEN_READ, 0, &object, &kit_err));
	OK(pen_explain(object, host, NULL, &explanation, &kit_err));
	resident = explanation->resident;
	pen_explain_free(explanation);
	pen_object_close(object);
	pen_device_close(host);
	return resident;
}

/* Drop a file from the page cache; what is being written back or looked at stays for a moment. */
static bool cooled(const char *path)
{
	for (int tries = 0; tries < 100; tries++) {
		kit_cool(path, 0, 0);
		if (!cached_bytes(path))
			return true;
		usleep(10000);
	}
	return false;
}

/* Two 8 MiB stretches of a file, one of them cached. */
static void read_half_cached(struct cell *cell)
{
	struct pen_extent extent = { .length = 16 * MIB, .memory = cell->memory };

	cell->declined = cell->route->transfer != PEN_AUTO;
	if (cell->declined)
		return;
	/* With one lane all would go the way of the larger part. */
	CHECK(cell->route->lanes != 1);
	if (!cooled(cell->name)) {
		kit_not_run("%s: its pages stay in the cache", kit_where);
		cell->declined = true;
		return;
	}
	kit_warm(cell->name, 8 * MIB, 8 * MIB);
	extent.object = open_source(cell);
	cell->report = (struct pen_report)PEN_REPORT_INIT;
	OK(pen_transfer(PEN_READ, cell->device, &extent, 1, &cell->options, &cell->report,
			&kit_err));
	check_report(cell, &cell->report, 16 * MIB);
	fetch_bed(cell, 16 * MIB);
	check_pattern(cell, 0, 16 * MIB, 0);
	CHECK(kit_has_path(&cell->report, cell->route->no_uring ? THREADS : URING));
	CHECK(kit_has_path(&cell->report, "cached") || kit_has_path(&cell->report, "mapped"));
	pen_object_close(extent.object);
}

TEST(a_half_cached_file_travels_both_ways_at_once)
{
	everywhere(ON_DISK, TO_ANY, READS, PATTERNED(16 * MIB), read_half_cached);
}

TEST(io_uring_forbidden_steps_down_and_says_so)
{
	struct pen_device *host = kit_device("host");
	struct pen_report report = PEN_REPORT_INIT;
	struct pen_extent extent = { .length = 9 * MIB };
	char path[256];
	void *memory;

	uring_forbidden = true;
	sys_fault_hook = forbid_uring;
	snprintf(path, sizeof(path), "%s/file", kit_folder(DISK));
	kit_pattern(path, 9 * MIB);
	kit_cool(path, 0, 0);
	OK(pen_device_alloc(host, 9 * MIB, &memory, &kit_err));
	extent.memory = memory;
	OK(pen_object_open(path, PEN_READ, 0, &extent.object, &kit_err));
	OK(pen_transfer(PEN_READ, host, &extent, 1, NULL, &report, &kit_err));
	CHECK_EQ(pattern_check(memory, 9 * MIB, 0), 9 * MIB);
	CHECK(kit_has_path(&report, THREADS));
	CHECK(report.refused_count);
	CHECK_TEXT(report.refused[0].path, "direct-uring");
	CHECK(strstr(report.refused[0].reason, "seccomp") != NULL);
	pen_object_close(extent.object);
	OK(pen_device_free(host, memory, 9 * MIB, &kit_err));
	pen_device_close(host);
}

/* ------------------------------------------------------------------- many things at a time -- */

#define OBJECTS 5

static void read_several(struct cell *cell)
{
	struct pen_extent extents[OBJECTS];
	char paths[OBJECTS][300];
	uint64_t at = 3;

	for (int i = 0; i < OBJECTS; i++) {
		uint64_t size = (uint64_t)i * 700 * KIB + 4097;

		if (cell->store == MADE_UP) {
			snprintf(paths[i], sizeof(paths[i]), "pattern:900000%d", i);
		} else {
			snprintf(paths[i], sizeof(paths[i]), "%s%d", cell->target, i);
			kit_pattern(paths[i], size);
			if (!cell->route->hot)
				kit_cool(paths[i], 0, 0);
		}
		extents[i] = (struct pen_extent){
			.length = size, .memory = cell->memory + at,
		};
		OK(pen_object_open(paths[i], PEN_READ, 0, &extents[i].object, &kit_err));
		at += size + 1;
	}
	make_bed(cell, at + GUARD);
	transfer(cell, PEN_READ, extents, OBJECTS);
	fetch_bed(cell, at + GUARD);
	for (int i = 0; i < OBJECTS; i++) {
		at = (uint64_t)((unsigned char *)extents[i].memory - cell->memory);
		check_guard(cell, at - 1, at);
		check_pattern(cell, at, extents[i].length, 0);
		pen_object_close(extents[i].object);
		kit_unlink(paths[i]);
	}
}

TEST(several_objects_travel_in_one_job)
{
	everywhere(ANYWHERE, TO_ANY, READS, PATTERNED(MIB), read_several);
}

#define WORKERS 4
/* Worth a ring. Not under the thread sanitizer: liburing maps and unmaps behind its back, so a ring
 * at the address of another job's last one looks like a race. */
#define WORK (KIT_TSAN ? 2 * MIB : 4 * MIB + 4096)

struct worker {
	struct cell *cell;
	unsigned int index;
	pthread_t thread;
};

static void *work(void *argument)
{
	struct worker *worker = argument;
	struct cell *cell = worker->cell;
	uint64_t slice = WORK + worker->index * 4099, offset = worker->index * 1009;
	unsigned char *memory = cell->memory + worker->index * (BED_SIZE / WORKERS);
	unsigned char *mirror = cell->mirror + worker->index * (BED_SIZE / WORKERS);

	for (int round = 0; round < 3; round++) {
		struct pen_extent extent = { .offset = offset, .length = slice, .memory = memory };
		struct pen_report report = PEN_REPORT_INIT;

		memset(mirror, GUARD_BYTE, slice);
		OK(pen_device_put(cell->device, memory, mirror, slice, &kit_err));
		OK(pen_object_open(cell->name, PEN_READ, 0, &extent.object, &kit_err));
		OK(pen_transfer(PEN_READ, cell->device, &extent, 1, &cell->options, &report,
				&kit_err));
		check_report(cell, &report, slice);
		OK(pen_device_get(cell->device, mirror, memory, slice, &kit_err));
		CHECK_EQ(pattern_check(mirror, slice, offset), slice);
		pen_object_close(extent.object);
	}
	return NULL;
}

static void work_in_parallel(struct cell *cell)
{
	struct worker workers[WORKERS];

	if (!cell->route->hot && cell->store != MADE_UP)
		kit_cool(cell->name, 0, 0);
	for (unsigned int i = 0; i < COUNT(workers); i++) {
		workers[i] = (struct worker){ .cell = cell, .index = i };
		CHECK_EQ(pthread_create(&workers[i].thread, NULL, work, &workers[i]), 0);
	}
	for (unsigned int i = 0; i < COUNT(workers); i++)
		pthread_join(workers[i].thread, NULL);
}

TEST(jobs_of_several_threads_do_not_meet)
{
	everywhere(ANYWHERE, TO_ANY, READS | (KIT_TSAN ? SMALL : 0), PATTERNED(9 * MIB + 17),
		   work_in_parallel);
}

TEST(devices_open_and_close_without_a_trace)
{

	for (int round = 0; round < 20; round++)
		for (size_t d = 0; d < COUNT(device_names); d++) {
			struct pen_device *device = kit_device(device_names[d]), *again;
			struct pen_extent extent = { .length = 2 * MIB };

			if (!device)
				continue;
			kit_at("%s, round %d", device_names[d], round);
			OK(pen_device_open(device_names[d], &again, &kit_err));
			CHECK(again == device);
			pen_device_close(again);
			OK(pen_device_alloc(device, 2 * MIB, &extent.memory, &kit_err));
			OK(pen_object_open("pattern:2M", PEN_READ, 0, &extent.object, &kit_err));
			OK(pen_transfer(PEN_READ, device, &extent, 1, NULL, NULL, &kit_err));
			pen_object_close(extent.object);
			OK(pen_device_free(device, extent.memory, 2 * MIB, &kit_err));
			pen_device_close(device);
			CHECK_EQ(kit_leaks(), 0);
		}
}

/* A device that is closed while its context is still coming up. */
TEST(a_device_can_be_closed_before_it_is_ready)
{
	struct pen_device *device;

	setenv("FAKE_CUDA_INIT_MS", "30", 1);
	if (pen_device_open("cuda:0", &device, &kit_err))
		SKIP("there is no GPU, not even a fake one");
	pen_device_close(device);
	CHECK_EQ(kit_leaks(), 0);
}

/* The job allocates its memory itself, so it can read while the context comes up. */
TEST_ALONE(reading_begins_before_the_gpu_is_ready)
{
	struct pen_report report = PEN_REPORT_INIT;
	struct pen_options options = PEN_OPTIONS_INIT;
	struct pen_extent extent = { .length = 8 * MIB };
	static unsigned char mirror[8 * MIB];
	struct pen_device *device;
	void *memory;

	setenv("FAKE_CUDA_INIT_MS", "1000", 1);
	if (pen_device_open("cuda:0", &device, &kit_err))
		SKIP("there is no GPU, not even a fake one");
	if (!kit_fake_cuda())
		SKIP("a real driver takes the time it takes");
	options.allocate = 8 * MIB;
	options.allocated = &memory;
	OK(pen_object_open("pattern:8M,rate=8M", PEN_READ, 0, &extent.object, &kit_err));
	OK(pen_transfer(PEN_READ, device, &extent, 1, &options, &report, &kit_err));
	pen_object_close(extent.object);
	OK(pen_device_get(device, mirror, memory, 8 * MIB, &kit_err));
	CHECK_EQ(pattern_check(mirror, 8 * MIB, 0), 8 * MIB);
	/* A second for the context and one for the store, at the same time. */
	CHECK(report.setup_seconds > 0.9);
	CHECK(report.seconds < 1.8 || KIT_SANITIZED);
	OK(pen_device_free(device, memory, 8 * MIB, &kit_err));
	pen_device_close(device);
}

/* Bytes wait in the ring for memory that will never be had. */
TEST(a_gpu_out_of_memory_ends_a_job_that_allocates)
{
	struct pen_options options = PEN_OPTIONS_INIT;
	struct pen_extent extent = { .length = 8 * MIB };
	struct pen_device *device;
	void *memory;

	setenv("FAKE_CUDA_INIT_MS", "100", 1);
	setenv("FAKE_CUDA_MEMORY", "4194304", 1);
	if (pen_device_open("cuda:0", &device, &kit_err))
		SKIP("there is no GPU, not even a fake one");
	if (!kit_fake_cuda())
		SKIP("a real GPU has too much memory");
	options.allocate = 8 * MIB;
	options.allocated = &memory;
	options.request_size = 256 * KIB;
	OK(pen_object_open("pattern:8M", PEN_READ, 0, &extent.object, &kit_err));
	REFUSED(-ENOMEM, pen_transfer(PEN_READ, device, &extent, 1, &options, NULL, &kit_err));
	CHECK(!memory);
	pen_object_close(extent.object);
	pen_device_close(device);
	CHECK_EQ(kit_leaks(), 0);
}

static void allocate(struct cell *cell)
{
	struct pen_object *object = open_source(cell);
	struct pen_extent extents[] = {
		{ .object = object, .memory = (void *)(uintptr_t)5, .length = 3 * MIB },
		{ .object = object, .offset = 5 * MIB, .memory = NULL, .length = 5 },
		{ .object = object, .offset = MIB, .memory = (void *)(uintptr_t)(5 * MIB + 1),
		  .length = 4 * MIB },
	};
	void *memory = &extents;

	cell->options.allocate = 9 * MIB + 1;
	cell->options.allocated = &memory;
	transfer(cell, PEN_READ, extents, COUNT(extents));
	OK(pen_device_get(cell->device, cell->mirror, memory, 9 * MIB + 1, &kit_err));
	check_pattern(cell, 5, 3 * MIB, 0);
	check_pattern(cell, 0, 5, 5 * MIB);
	check_pattern(cell, 5 * MIB + 1, 4 * MIB, MIB);
	OK(pen_device_free(cell->device, memory, 9 * MIB + 1, &kit_err));
	/* An extent that ends beyond the memory is refused; a failed job leaves no memory. */
	cell->options.allocate = 9 * MIB;
	CHECK(pen_transfer(PEN_READ, cell->device, extents, COUNT(extents), &cell->options, NULL,
			   &kit_err) < 0);
	CHECK(kit_err.message[0]);
	cell->options.allocate = 9 * MIB + 1;
	cell->options.inject = "fail:1:ENXIO";
	memory = &extents;
	REFUSED(-ENXIO, pen_transfer(PEN_READ, cell->device, extents, COUNT(extents),
				     &cell->options, NULL, &kit_err));
	CHECK(!memory);
	pen_object_close(object);
}

TEST(a_job_can_allocate_the_memory_it_reads_into)
{
	everywhere(ANYWHERE, TO_ANY, READS, PATTERNED(9 * MIB + 17), allocate);
}

/* As the header says of pen_device_close(). */
TEST(memory_outlives_the_device_it_came_from)
{
	static unsigned char mirror[100];
	struct pen_device *device = kit_device("cuda:0");
	void *memory;

	if (!device)
		SKIP("there is no GPU, not even a fake one");
	OK(pen_device_alloc(device, 100, &memory, &kit_err));
	pattern_fill(mirror, 100, 0);
	OK(pen_device_put(device, memory, mirror, 100, &kit_err));
	pen_device_close(device);
	device = kit_device("cuda:0");
	memset(mirror, 0, sizeof(mirror));
	OK(pen_device_get(device, mirror, memory, 100, &kit_err));
	CHECK_EQ(pattern_check(mirror, 100, 0), 100);
	OK(pen_device_free(device, memory, 100, &kit_err));
	pen_device_close(device);
}

TEST_MAIN
