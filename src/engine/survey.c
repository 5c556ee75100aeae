/* SPDX-License-Identifier: MIT */
/*
 * Which requests go around the page cache and which through it; see schedule.h. Residency is asked
 * for large stretches first, and finer only where an answer is mixed.
 */
#include "engine/schedule.h"
#include "io/object.h"

/* Residency is asked for this much at a time, and finer where a part is cached. */
#define SURVEY_COARSE ((uint64_t)64 << 20)
#define SURVEY_FINE ((uint64_t)4 << 20)
/* A range with this share of its pages cached goes through the cache. */
#define HOT_SHARE 0.9
/* Holes up to this are read through: copying a hole from the cache costs less than another request,
 * while on a disk it takes the place of bytes that are wanted. */
#define GAP_CACHED ((uint64_t)64 << 10)
#define GAP_DISK ((uint64_t)16 << 10)
/* The residency of about so many extents, and of so much of each plain one, decides which. */
#define GAP_SAMPLES 64u
#define GAP_SAMPLE ((uint64_t)1 << 20)

static void put(struct schedule *schedule, enum path_side side, uint32_t request)
{
	struct work *work = &schedule->work[side];

	work->requests[work->count++] = request;
	work->bytes += schedule->plan->requests[request].length;
}

static bool is_hot(struct pen_object *object, uint64_t offset, uint64_t length)
{
	uint64_t resident;

	/* Where residency cannot be asked, direct reads are right for cold and for hot bytes. */
	if (object_residency(object, offset, length, &resident, NULL))
		return false;
	return (double)resident >= HOT_SHARE * (double)length;
}

/* All or nothing of a stretch, or -1 for mixed. */
static int uniform(struct pen_object *object, uint64_t offset, uint64_t length)
{
	uint64_t resident;

	if (object_residency(object, offset, length, &resident, NULL) || !resident)
		return AROUND;
	return resident == length ? THROUGH : -1;
}

/* Survey the requests [first, last) of one object that fall into one coarse stretch. */
static void survey_stretch(struct schedule *schedule, size_t first, size_t last)
{
	struct plan_request *requests = schedule->plan->requests;
	struct pen_object *object = schedule->plan->objects[requests[first].object];
	uint64_t start = requests[first].offset;
	uint64_t end = requests[last - 1].offset + requests[last - 1].length;
	int side = uniform(object, start, end - start);

	/* What cannot go direct goes through the page cache, there or not. */
	if (!object->info.offset_align) {
		schedule->uncached |= side != THROUGH;
		side = THROUGH;
	}
	while (first < last) {
		size_t stop = first + 1;
		int fine = side;

		if (side < 0) {
			uint64_t window = requests[first].offset / SURVEY_FINE;

			while (stop < last && requests[stop].offset / SURVEY_FINE == window)
				stop++;
			fine = is_hot(object, requests[first].offset,
				      requests[stop - 1].offset + requests[stop - 1].length -
					      requests[first].offset)
				       ? THROUGH
				       : AROUND;
		}
		for (; first < stop; first++)
			put(schedule, (enum path_side)fine, (uint32_t)first);
	}
}

void survey(struct schedule *schedule)
{
	struct plan *plan = schedule->plan;
	size_t first = 0;

	while (first < plan->request_count) {
		const struct plan_request *head = &plan->requests[first];
		size_t last = first + 1;

		while (last < plan->request_count && plan->requests[last].object == head->object &&
		       plan->requests[last].offset / SURVEY_COARSE == head->offset / SURVEY_COARSE)
			last++;
		survey_stretch(schedule, first, last);
		first = last;
	}
}

static void empty_lists(struct schedule *schedule)
{
	for (int i = 0; i < SIDES; i++)
		schedule->work[i].count = schedule->work[i].bytes = 0;
}

void survey_all_to(struct schedule *schedule, enum path_side side)
{
	empty_lists(schedule);
	for (size_t i = 0; i < schedule->plan->request_count; i++)
		put(schedule, side, (uint32_t)i);
}

void survey_straight(struct schedule *schedule)
{
	struct work *around = &schedule->work[AROUND];
	size_t count = around->count, next = 0;

	/* Both lists anew; what is written of the first has been read before. */
	empty_lists(schedule);
	for (size_t i = 0; i < schedule->plan->request_count; i++) {
		bool was_around = next < count && around->requests[next] == i;

		next += was_around;
		put(schedule,
		    was_around && plan_on_gpu(schedule->plan, (uint32_t)i) ? AROUND : THROUGH,
		    (uint32_t)i);
	}
}

/* The bytes of an extent that are looked at. What is out of bounds is refused later, in words, and
 * not looked at. */
static uint64_t gap_sample(const struct pen_extent *extent)
{
	uint64_t length, end;

	if (extent->rows < 2)
		length = extent->length < GAP_SAMPLE ? extent->length : GAP_SAMPLE;
	else if (__builtin_mul_overflow(extent->rows - 1, extent->object_pitch, &length))
		return 0;
	if (__builtin_add_overflow(extent->offset, length, &end) ||
	    end > extent->object->info.size)
		return 0;
	return length;
}

uint64_t survey_gap(const struct pen_options *options, const struct pen_extent *extents,
		    size_t count)
{
	size_t step = (count + GAP_SAMPLES - 1) / GAP_SAMPLES;
	uint64_t total = 0, cached = 0, resident;

	if (options->gap)
		return options->gap == UINT64_MAX ? 0 : options->gap;
	for (size_t i = 0; i < count; i += step) {
		const struct pen_extent *extent = &extents[i];
		uint64_t length;

		if (!extent->object || !extent->object->info.has_residency)
			continue;
		length = gap_sample(extent);
		if (!length)
			continue;
		total += length;
		if (!object_residency(extent->object, extent->offset, length, &resident, NULL))
			cached += resident;
	}
	return cached * 2 < total ? GAP_DISK : GAP_CACHED;
}
