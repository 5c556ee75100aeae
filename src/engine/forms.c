/* SPDX-License-Identifier: MIT */
/*
 * The last step of bytes whose form changes on their way to a GPU. Its kernel does it, reading the
 * slot by itself, in the place of a copy and in the order of the same stream. Where there is no
 * kernel, or the slot is not pinned, the lane does it: part by part into memory of its own, each
 * copied before the next is made. That is slow, and the report says why it had to be.
 */
#include <errno.h>
#include "base/error.h"
#include "engine/job.h"
#include "engine/lane.h"
#include "sys/os.h"

#define PART_SIZE ((size_t)1 << 20)

static int convert_part(struct lane *lane, struct job_device *device, struct device_copy part,
			struct pen_error *err)
{
	int rc;

	part.form->apply(lane->part, part.host, part.width / part.form->from_size);
	part.host = lane->part;
	part.width = form_bytes(part.form, part.width);
	part.form = NULL;
	rc = device_copy(device->device, &device->stream, &part, err);
	/* The next part goes to the same memory. */
	device_stream_drain(device->device, &device->stream);
	return rc;
}

static int convert_by_core(struct lane *lane, struct job_device *device,
			   const struct device_copy *copy, struct pen_error *err)
{
	size_t room = PART_SIZE / copy->form->to_size * copy->form->from_size;
	int rc = 0;

	if (!lane->part)
		lane->part = os_calloc(1, PART_SIZE);
	if (!lane->part)
		return error_sys(err, -ENOMEM, "change the form of", "what was read", -1);
	for (size_t row = 0; row < copy->rows; row++)
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

int forms_queue(struct lane *lane, const struct transit *transit, struct job_device *device,
		const struct device_copy *copy, struct pen_error *err)
{
	const struct piece *piece = lane->staging.pieces[transit->slot->piece].piece;
	struct pen_error why;
	int rc;

	if (piece_pinned(piece)) {
		rc = device_copy(device->device, &device->stream, copy, &why);
		if (rc && rc != -ENOTSUP && err)
			*err = why;
		if (rc != -ENOTSUP)
			return rc;
	} else {
		error_set(&why, -ENOTSUP, "start a kernel on", device->device->name, -1,
			  "the staging memory could not be pinned, so the GPU cannot read it");
	}
	job_refused(lane->job, "kernels", &why);
	return convert_by_core(lane, device, copy, err);
}
