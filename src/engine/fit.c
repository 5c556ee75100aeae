/* SPDX-License-Identifier: MIT */
/*
 * Fitting a schedule into its memory promise: how many lanes each path has, how large its requests
 * may be, and how the staging memory is cut into pieces; see schedule.h.
 *
 * The mapped path pins page cache; its share comes off first. The rest is cut into pieces such that
 * each lane that stages has at least one, and what it needs should kernels fail it: fewer lanes
 * rather than more memory.
 */
#include <errno.h>
#include "base/error.h"
#include "engine/schedule.h"
#include "io/object.h"
#include "mem/staging.h"
#include "sys/memory.h"

/* Where a write gathers far ahead, and there would be so many of them, pieces are large: each is
 * registered by itself. There are only these two sizes, so that one job finds what another left. */
#define PIECE_LARGE ((size_t)64 << 20)
#define PIECES_MANY 128u

/* Does a lane of this path stage what it carries? */
static bool stages(const struct path *path)
{
	return !path->kind->queue->lends && !path->kind->queue->on_device;
}

size_t schedule_part(const struct schedule *schedule)
{
	return schedule->gpu && schedule->plan->formed_bytes ? (size_t)(schedule->unit / 2) : 0;
}

/* Most bytes of page cache a mapped path pins: two requests a lane. */
static uint64_t mapped_most(const struct path *path)
{
	return (uint64_t)path->size * 2 * path->lanes;
}

/* Share the lanes that were asked for out over the paths; each has at least one. */
static void share_lanes(struct schedule *schedule, unsigned int lanes)
{
	unsigned int left = lanes;

	for (unsigned int i = 0; lanes && i < schedule->path_count; i++) {
		struct path *path = &schedule->paths[i];
		unsigned int after = schedule->path_count - i - 1;
		unsigned int most = left > after ? left - after : 1;

		/* The last path takes all that is left. */
		path->lanes = after ? at_most(path->lanes, most) : most;
		left -= at_most(path->lanes, left);
	}
}

unsigned int schedule_pieces_kept(const struct schedule *schedule, const struct path *path)
{
	if (path->kind->queue->lends || (path->kind->queue->on_device && !schedule->gds))
		return 0;
	return path->lanes * (path->pieces_first ? path->pieces_first : 1);
}

static unsigned int all_pieces_kept(const struct schedule *schedule)
{
	unsigned int kept = 0;

	for (unsigned int i = 0; i < schedule->path_count; i++)
		kept += schedule_pieces_kept(schedule, &schedule->paths[i]);
	return kept;
}

/* How many pieces lanes take before their first request: as many as each of them will use, and all
 * lanes at once may have. Otherwise they take them one by one, as they find work. */
static void fit_first_pieces(struct schedule *schedule, unsigned int most)
{
	for (unsigned int i = 0; i < schedule->path_count; i++) {
		struct path *path = &schedule->paths[i];
		uint64_t share = schedule->work[path->side].bytes / (path->lanes ? path->lanes : 1);

		/* Two requests may fit into one piece, and a short job has no second round. */
		if (path->pieces_first && (schedule->one_at_a_time || share < 2 * path->size ||
					   2 * path->size <= schedule->piece_size))
			path->pieces_first = share < schedule->unit ? 0 : 1;
	}
	for (unsigned int first = 2; first-- && all_pieces_kept(schedule) > most;)
		for (unsigned int i = 0; i < schedule->path_count; i++)
			schedule->paths[i].pieces_first =
				at_most(schedule->paths[i].pieces_first, first);
}

/* Sizes of requests as the caller and the stores want them. */
static void fit_sizes(struct schedule *schedule, const struct pen_options *options)
{
	uint32_t most = 0;

	for (size_t i = 0; i < schedule->plan->object_count; i++) {
		uint32_t own = schedule->plan->objects[i]->info.request_most;

		if (own && (!most || own < most))
			most = own;
	}
	for (unsigned int i = 0; i < schedule->path_count; i++) {
		struct path *path = &schedule->paths[i];

		if (options->request_size)
			path->size = (uint32_t)(options->request_size > schedule->unit
							? options->request_size
							: schedule->unit);
		if (most && (!path->size || path->size > most))
			path->size = most;
	}
}

static void fit_memory(struct schedule *schedule, const struct pen_options *options)
{
	uint64_t limit = options->memory_limit;
	uint64_t share = schedule->path_count > 1 ? limit / 2 : limit;
	size_t piece = options->request_size > PIECE_SIZE ? options->request_size : PIECE_SIZE;
	size_t part = schedule_part(schedule);
	unsigned int staging = 0, fitting, most;

	if (schedule->unit > piece)
		piece = schedule->unit;
	if (schedule->ahead && limit / PIECE_LARGE >= PIECES_MANY && piece < PIECE_LARGE)
		piece = PIECE_LARGE;
	for (unsigned int i = 0; i < schedule->path_count; i++) {
		struct path *path = &schedule->paths[i];

		staging += stages(path) ? path->lanes : 0;
		if (!path->kind->queue->lends)
			continue;
		while (path->size > schedule->unit && mapped_most(path) > share)
			path->size /= 2;
		while (path->lanes > 1 && mapped_most(path) > share)
			path->lanes--;
		limit -= mapped_most(path) < limit ? mapped_most(path) : limit;
		/* A lane that steps down gives this share back to the staging, in pieces. */
		while (piece > 2 * path->size - part)
			piece /= 2;
	}
	while (piece > schedule->unit && piece > options->request_size &&
	       staging * (piece + part) > limit)
		piece /= 2;
	fitting = at_most(staging, (unsigned int)(limit / (piece + part)));
	limit -= fitting * part;
	most = (unsigned int)(limit / piece);
	for (unsigned int i = 0; i < schedule->path_count; i++) {
		struct path *path = &schedule->paths[i];

		if (!stages(path))
			continue;
		if (staging > fitting)
			path->lanes = path->lanes * fitting / staging
					      ? path->lanes * fitting / staging
					      : 1;
		if (!path->size || path->size > piece)
			path->size = (uint32_t)(options->request_size ||
						piece < PIECE_SIZE ? piece : PIECE_SIZE);
		if (!path->pieces_max || schedule->ahead)
			path->pieces_max = most;
		/* They find out what they need as they go. */
		if (schedule->ahead)
			path->pieces_first = 0;
	}
	schedule->memory_limit = limit;
	schedule->piece_size = piece;
	fit_first_pieces(schedule, most);
}

/* Slots of each lane: where a write shall gather as far ahead as there is memory, one lane might
 * carry all. What it never uses of them is never touched, and costs nothing. */
static void fit_slots(struct schedule *schedule)
{
	schedule->slots = STAGING_SLOTS;
	if (schedule->ahead && schedule->plan->request_count > STAGING_SLOTS)
		schedule->slots = (unsigned int)schedule->plan->request_count;
}

/* More than the bytes themselves: each lane has a piece that is not full, and pieces end where the
 * next slot does not fit. Of this only what is needed is taken. */
static uint64_t wish(const struct pen_extent *extents, size_t count)
{
	uint64_t bytes = 0;

	for (size_t i = 0; i < count; i++)
		bytes += extents[i].length * (extents[i].rows ? extents[i].rows : 1);
	return bytes + bytes / 8 + MEMORY_LIMIT_DEFAULT;
}

uint64_t fit_plenty(uint64_t wished, uint64_t available, uint64_t kept)
{
	uint64_t plenty = available / 2 + kept;

	if (plenty < MEMORY_LIMIT_DEFAULT)
		plenty = MEMORY_LIMIT_DEFAULT;
	return wished < plenty ? wished : plenty;
}

uint64_t fit_limit(const struct pen_options *options, bool write, const struct pen_extent *extents,
		   size_t count)
{
	if (options->memory_limit != PEN_MEMORY_AUTO)
		return options->memory_limit;
	if (!write || !options->groups)
		return MEMORY_LIMIT_DEFAULT;
	return fit_plenty(wish(extents, count), memory_available(""), piece_kept());
}

/* A block of the store must fit into a request. */
static int check_blocks(const struct schedule *schedule, struct pen_error *err)
{
	const struct plan *plan = schedule->plan;

	for (size_t i = 0; i < plan->object_count; i++) {
		uint32_t align = plan->objects[i]->info.offset_align;

		if (!schedule->work[AROUND].count || align <= schedule->unit)
			continue;
		error_set(err, -EINVAL, "keep within", "the memory limit", -1,
			  "the store wants blocks of %u bytes, requests are of %llu", align,
			  (unsigned long long)schedule->unit);
		error_hint(err, "Raise the memory limit or the request size");
		return -EINVAL;
	}
	return 0;
}

int fit(struct schedule *schedule, const struct pen_options *options, bool write,
	struct pen_error *err)
{
	/* Who asks for groups of a write wants them gathered before the store has them. */
	schedule->ahead = write && options->groups;
	share_lanes(schedule, options->lanes);
	fit_sizes(schedule, options);
	fit_memory(schedule, options);
	fit_slots(schedule);
	return check_blocks(schedule, err);
}
