/* SPDX-License-Identifier: MIT */
#ifndef FORMAT_CODED_LOAD_H
#define FORMAT_CODED_LOAD_H
/*
 * Loading coded tensors to host memory. Of each placement the chunks that it needs are read. They
 * are cut into parts, each a group of the job and decoded by the lane that brings its last byte, so
 * that all lanes decode a large tensor:
 *
 *   a whole tensor   the coded bytes of a part are read to the end of the memory that its values
 *                    shall have, and decoded from its beginning on. No chunk is longer coded than
 *                    it is decoded, so what is written never overtakes what is to be read; no other
 *                    memory is needed.
 *   a box, or        the chunks are read to memory of their own, and what the box has of each is
 *   another dtype    copied, or converted, to where it belongs.
 */
#include "engine/job.h"
#include "format/model.h"
#include "penstock.h"

struct coded_load;

/* For `count` placements of a job on a device. The caller has `groups` groups, as many or more. */
int coded_load_new(struct pen_model *model, struct pen_device *device, size_t count,
		   uint64_t groups, struct coded_load **load, struct pen_error *err);
void coded_load_free(void *load);	/* struct coded_load, or NULL */

/* Placement `group` of a tensor that is not coded: its extents. */
int coded_load_plain(struct coded_load *load, uint64_t group, const struct pen_extent *extents,
		     size_t count, struct pen_error *err);

/*
 * Placement `group` of a coded tensor, which is not empty: `box` are the extents that it would have
 * if the tensor were an object that is not coded. They belong to the load from now on, also after
 * an error.
 */
int coded_load_add(struct coded_load *load, uint64_t group, const struct pen_tensor *tensor,
		   struct pen_extent *box, size_t box_count, struct pen_error *err);

/* What is to be read, and how many groups it has. They are the load's. */
const struct pen_extent *coded_load_extents(const struct coded_load *load, size_t *count,
					    uint64_t *groups);

/* The rest is up to the job: see engine/job.h. */
int coded_load_finish(void *load, void *allocated, uint64_t *group, struct pen_error *err);

#endif
