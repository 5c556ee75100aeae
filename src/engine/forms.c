/* SPDX-License-Identifier: MIT */
/*
 * The last step of bytes that are coded, or whose form changes on their way to a GPU. Its kernel
 * does it, reading the slot by itself, in the place of a copy and in the order of the same stream.
 * Where there is no kernel, or the slot is not pinned, the lane does it: part by part into memory
 * of its own, each copied before the next is made. That is slow, and the report says why it had to
 * be. To the host's memory the lane decodes straight.
 */
#include <errno.h>
#include "base/error.h"
#include "engine/job.h"
#include "engine/lane.h"
#include "sys/os.h"

/* A chunk of four bytes a value, in the largest form. */
#define CHUNK_ROOM ((size_t)PLANES_CHUNK * 4)
_Static_assert(PLAN_UNIT_CODED / 2 >= CHUNK_ROOM, "a part has room for a chunk");

static int need_part(struct lane *lane, struct pen_error *err)
{
	size_t size = schedule_part(lane->job->schedule);

	if (lane->part)
		return 0;
	lane->part = os_calloc(1, size);
	if (!lane->part)
		return error_sys(err, -ENOMEM, "change the form of", "what was read", -1);
	budget_count(&lane->job->budget, (int64_t)size);
	return 0;
}

static int convert_part(struct lane *lane, unsigned int device, struct device_copy part,
			struct pen_error *err)
{
	struct pen_device *to = lane->job->devices[device].device;
	int rc;

	part.form->apply(lane->part, part.host, part.width / part.form->from_size);
	part.host = lane->part;
	part.width = form_bytes(part.form, part.width);
	part.form = NULL;
	rc = device_copy(to, lane_stream(lane, device), &part, err);
	/* The next part goes to the same memory. */
	device_stream_drain(to, lane_stream(lane, device));
	return rc;
}

static int convert_by_core(struct lane *lane, unsigned int device,
			   const struct device_copy *copy, struct pen_error *err)
{
	size_t room = schedule_part(lane->job->schedule) / copy->form->to_size *
		      copy->form->from_size;
	int rc = need_part(lane, err);

	for (size_t row = 0; row < copy->rows && !rc; row++)
		for (size_t at = 0; at < copy->width && !rc; at += room)
			rc = convert_part(lane, device, (struct device_copy){
				.memory = copy->memory + row * copy->memory_pitch +
					  form_bytes(copy->form, at),
				.host = copy->host + row * copy->host_pitch + at,
				.width = copy->width - at < room ? copy->width - at : room,
				.rows = 1,
				.to_device = true,
				.form = copy->form,
			}, err);
	return rc;
}

/* Can a GPU read the slot by itself? What is lent, it can. */
static bool is_pinned(struct lane *lane, const struct transit *transit, unsigned int device,
		      struct pen_error *why)
{
	if (lane->queue.inner->lends ||
	    piece_pinned(lane->staging.pieces[transit->slot->piece].piece))
		return true;
	error_set(why, -ENOTSUP, "start a kernel on", lane->job->devices[device].device->name, -1,
		  "the staging memory could not be pinned, so the GPU cannot read it");
	return false;
}

/* Did no kernel do it, and may a core? Not where it would have to look into a mapping: the file may
 * be cut short meanwhile. */
static bool cores_can(const struct lane *lane, int rc)
{
	return rc == -ENOTSUP && !lane->queue.inner->lends;
}

int forms_queue(struct lane *lane, const struct transit *transit, unsigned int device,
		const struct device_copy *copy, struct pen_error *err)
{
	struct pen_error why;
	int rc = -ENOTSUP;

	if (is_pinned(lane, transit, device, &why))
		rc = device_copy(lane->job->devices[device].device, lane_stream(lane, device), copy,
				 &why);
	if (!cores_can(lane, rc)) {
		if (rc && err)
			*err = why;
		return rc;
	}
	job_refused(lane->job, "kernels", &why);
	return convert_by_core(lane, device, copy, err);
}

/* -------------------------------------------------------------------------------- decoding -- */

/* A core decodes chunks of a part to memory that it can write to; only what the box has of them,
 * or, `dense`, all of their values one after the other. */
static int decode_here(struct lane *lane, const struct coding_part *part, bool dense,
		       struct pen_error *err)
{
	const struct coding *coding = part->coding;
	struct decode_launch launch;
	unsigned int verdict = 0;
	uint64_t start = os_now();

	launch.verdict = &verdict;
	launch.mark = 0;
	for (uint64_t done = 0; done < part->count; done += launch.count) {
		coding_launch(part, done, &launch);
		if (dense) {
			launch.first = (long long)(done * PLANES_CHUNK);
			launch.length = launch.first + launch.values;
			launch.rows = 1;
		}
		decode_run(&launch, coding->kind, coding->form);
		if (verdict) {
			coding->damaged(coding, part->first + done + verdict - 1, err);
			return -EBADMSG;
		}
	}
	lane->decode_ns += os_now() - start;
	lane->core_decoded_bytes += coding_chunk_end(coding, part->first + part->count - 1) -
				    coding->offsets[part->first];
	return 0;
}

/* Copy what the box has of values in lane->part, `count` of them from number `first` of the tensor
 * on, to a GPU: the end of a row, whole rows, the begin of one. */
static int copy_box(struct lane *lane, unsigned int device, const struct coding_part *part,
		    uint64_t first, uint64_t count, struct pen_error *err)
{
	const struct coding *coding = part->coding;
	struct pen_device *to = lane->job->devices[device].device;
	uint64_t size = coding_value_size(coding), end = first + count;
	uint64_t row = 0;
	int rc = 0;

	if (coding->rows > 1 && first > coding->start)
		row = (first - coding->start) / coding->pitch;
	while (row < coding->rows && !rc) {
		uint64_t begin = coding->start + row * coding->pitch;
		uint64_t stop = begin + coding->length, rows = 1;
		uint64_t low = begin > first ? begin : first, high = stop < end ? stop : end;

		if (begin >= end)
			break;
		while (low == begin && high == stop && row + rows < coding->rows &&
		       stop + rows * coding->pitch <= end)
			rows++;
		if (low < high) {
			struct device_copy copy = {
				.memory = part->memory + row * coding->memory_pitch +
					  (low - begin) * size,
				.host = (unsigned char *)lane->part + (low - first) * size,
				.width = (high - low) * size,
				.rows = rows,
				.memory_pitch = coding->memory_pitch,
				.host_pitch = coding->pitch * size,
				.to_device = true,
			};

			rc = device_copy(to, lane_stream(lane, device), &copy, err);
		}
		row += rows;
	}
	/* The next part goes to the same memory. */
	device_stream_drain(to, lane_stream(lane, device));
	return rc;
}

static int decode_by_core(struct lane *lane, unsigned int device, const struct coding_part *part,
			  struct pen_error *err)
{
	const struct coding *coding = part->coding;
	uint64_t most = schedule_part(lane->job->schedule) / CHUNK_ROOM;
	int rc = need_part(lane, err);

	for (uint64_t done = 0; done < part->count && !rc; done += most) {
		uint64_t first = (part->first + done) * PLANES_CHUNK;
		struct coding_part some = {
			.coding = coding,
			.first = part->first + done,
			.count = part->count - done < most ? part->count - done : most,
			.stored = part->stored + (coding->offsets[part->first + done] -
						  coding->offsets[part->first]),
			.memory = lane->part,
		};
		uint64_t count = some.count * PLANES_CHUNK;

		rc = decode_here(lane, &some, true, err);
		if (!rc)
			rc = copy_box(lane, device, part, first,
				      count < coding->values - first ? count
								     : coding->values - first,
				      err);
	}
	return rc;
}

/* Values that do not lie as their size wants it are more than a kernel can store. */
static bool lies_well(const struct coding_part *part, struct pen_error *why)
{
	if (((uintptr_t)part->memory | part->coding->memory_pitch) %
		    coding_value_size(part->coding) == 0)
		return true;
	error_set(why, -ENOTSUP, "decode to", "a tensor's memory", -1,
		  "a tensor does not begin at a multiple of the size of its values");
	return false;
}

int forms_decode(struct lane *lane, struct transit *transit, unsigned int device,
		 const struct coding_part *part, struct pen_error *err)
{
	struct pen_device *to = lane->job->devices[device].device;
	struct pen_error why;
	int rc = -ENOTSUP;

	if (to->is_host)
		return decode_here(lane, part, false, err);
	if (is_pinned(lane, transit, device, &why) && lies_well(part, &why))
		rc = device_decode(to, lane_stream(lane, device), part, transit->decoded,
				   &lane->fences[transit->fences][device], &why);
	/* Chunks count however they were decoded, so that a verdict finds its own. */
	transit->decoded += (uint32_t)part->count;
	if (!cores_can(lane, rc)) {
		if (rc)
			*err = why;
		return rc;
	}
	job_refused(lane->job, "kernels", &why);
	return decode_by_core(lane, device, part, err);
}
