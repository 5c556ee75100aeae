/* SPDX-License-Identifier: MIT */
/*
 * Digesting bytes as they pass: of a read when they have landed, of a write when they are gathered,
 * each time in the lane's own buffer. A chunk that is moved whole lies in one request, so its value
 * does not depend on the order in which requests come home. Where read extents overlap, several
 * requests may pass the same chunk: each that sees it whole writes the same, and what was seen
 * whole by one stays so whatever others missed.
 */
#include "base/digest.h"
#include "engine/job.h"
#include "engine/lane.h"
#include "io/object.h"

static void keep(const struct pen_digests *digests, uint64_t chunk, uint64_t value)
{
	__atomic_store_n(&digests->values[chunk], value, __ATOMIC_RELAXED);
	__atomic_store_n(&digests->states[chunk], (unsigned char)PEN_CHUNK_DIGESTED,
			 __ATOMIC_RELAXED);
}

/* A chunk that somebody has seen whole stays so. */
static void miss(const struct pen_digests *digests, uint64_t chunk)
{
	unsigned char state = PEN_CHUNK_UNTOUCHED;

	__atomic_compare_exchange_n(&digests->states[chunk], &state,
				    (unsigned char)PEN_CHUNK_UNVERIFIED, false, __ATOMIC_RELAXED,
				    __ATOMIC_RELAXED);
}

/* A chunk, and the bytes of the object that are in it. */
struct stretch {
	uint64_t index, begin, stop;
};

/* How many cuts are not above `at`. */
static uint64_t cuts_before(const struct pen_digests *digests, uint64_t at)
{
	size_t low = 0, high = digests->cut_count;

	while (low < high) {
		size_t middle = low + (high - low) / 2;

		if (digests->cuts[middle] <= at)
			low = middle + 1;
		else
			high = middle;
	}
	return low;
}

static struct stretch chunk_at(const struct pen_digests *digests, uint64_t at, uint64_t size)
{
	uint64_t whole = at / digests->chunk, cuts = cuts_before(digests, at);
	struct stretch chunk = { .index = whole + cuts, .begin = whole * digests->chunk };

	chunk.stop = size - chunk.begin < digests->chunk ? size : chunk.begin + digests->chunk;
	if (cuts && digests->cuts[cuts - 1] > chunk.begin)
		chunk.begin = digests->cuts[cuts - 1];
	if (cuts < digests->cut_count && digests->cuts[cuts] < chunk.stop)
		chunk.stop = digests->cuts[cuts];
	return chunk;
}

/* `data` is where the transit's first byte lies; NULL: nobody sees it. */
static void walk(struct lane *lane, const struct transit *transit, const unsigned char *data)
{
	uint32_t object = lane->job->schedule->plan->requests[transit->range.first].object;
	const struct pen_digests *digests = lane->job->digests ? lane->job->digests[object] : NULL;
	uint64_t size, next;

	if (!digests)
		return;
	size = digests->object->info.size ? digests->object->info.size : UINT64_MAX;
	for (uint64_t at = transit->offset; at < transit->end; at = next) {
		struct stretch chunk = chunk_at(digests, at, size);

		next = chunk.stop < transit->end ? chunk.stop : transit->end;
		if (chunk.index < digests->count && data && at == chunk.begin &&
		    next == chunk.stop) {
			keep(digests, chunk.index,
			     digest_kind(digests->kind)->of(data + (at - transit->offset),
							    (size_t)(next - at)));
			lane->digested_bytes += next - at;
			continue;
		}
		if (chunk.index < digests->count)
			miss(digests, chunk.index);
		lane->unverified_bytes += next - at;
	}
}

void look(struct lane *lane, const struct transit *transit)
{
	walk(lane, transit, transit->buffer + (transit->offset - transit->start));
}

void look_unseen(struct lane *lane, const struct transit *transit)
{
	walk(lane, transit, NULL);
}
