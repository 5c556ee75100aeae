/* SPDX-License-Identifier: MIT */
#ifndef FORMAT_CODED_LOAD_H
#define FORMAT_CODED_LOAD_H
/*
 * Loading coded tensors to host memory. Of each placement the chunks that it needs are read, and
 * decoded by the lane that brings the last of them:
 *
 *   a whole tensor   its coded bytes are read to the end of the tensor's own memory and decoded
 *                    from its beginning on. No chunk is longer coded than it is decoded, so what
 *                    is written never overtakes what is to be read; no other memory is needed.
 *   a box            its chunks are read to memory of their own, and what the box has of each is
 *                    copied to where it belongs.
 */
#include "engine/job.h"
#include "format/model.h"
#include "penstock.h"

struct coded_load;

/* For `count` placements of a job on a device. */
int coded_load_new(struct pen_model *model, struct pen_device *device, size_t count,
		   struct coded_load **load, struct pen_error *err);
void coded_load_free(void *load);	/* struct coded_load, or NULL */

/*
 * Placement `group` of a coded tensor, which is not empty: `box` are the extents that it would have
 * if the tensor were an object that is not coded. They belong to the load from now on, also after
 * an error. Sets `extent` to the one that is to be read.
 */
int coded_load_add(struct coded_load *load, uint64_t group, const struct pen_tensor *tensor,
		   struct pen_extent *box, size_t box_count, struct pen_extent *extent,
		   struct pen_error *err);

/* The rest is up to the job: see engine/job.h. */
int coded_load_finish(void *load, void *allocated, uint64_t group, struct pen_error *err);

#endif
