/* SPDX-License-Identifier: MIT */
/* The table of paths; see paths.h. */
#include <stddef.h>
#include "engine/paths.h"

#define KIB (1u << 10)
#define MIB (1u << 20)

const struct path_kind path_kinds[PATHS] = {
	[PATH_GDS] = {
		.name = "gds",
		.what = "cuFile with GPUDirect Storage: the GPU and the store reach each other",
		.transport = TRANSPORT_FILE,
		.side = AROUND,
		.queue = &queue_cufile_ops,
		.down = PATH_DIRECT_URING,
		.down_unasked = true,
		.size = 16 * MIB,
		.lanes = 8,
		.lane_worth = 16 * MIB,
	},
	/* Never chosen, only asked for: it is slower than what it hides. */
	[PATH_CUFILE_COMPAT] = {
		.name = "cufile-compat",
		.what = "cuFile without GPUDirect Storage: it stages in host memory by itself",
		.transport = TRANSPORT_FILE,
		.side = AROUND,
		.queue = &queue_cufile_ops,
		.down = PATH_NONE,
		.size = 16 * MIB,
		.lanes = 8,
		.lane_worth = 16 * MIB,
	},
	[PATH_DIRECT_URING] = {
		.name = "direct-uring",
		.what = "O_DIRECT through io_uring, into registered staging or host memory",
		.transport = TRANSPORT_FILE,
		.side = AROUND,
		.queue = &queue_uring_ops,
		.direct = true,
		.tuned = true,
		.seen = true,
		.down = PATH_DIRECT_THREADS,
		.lanes = 4,
		.lanes_host = 4,
		.lane_worth = 8 * MIB,
	},
	[PATH_DIRECT_THREADS] = {
		.name = "direct-threads",
		.what = "O_DIRECT by threads that wait: where io_uring is refused or not worth it",
		.transport = TRANSPORT_FILE,
		.side = AROUND,
		.queue = &queue_sync_ops,
		.direct = true,
		.tuned = true,
		.seen = true,
		.down = PATH_CACHED,
		.lanes = 16,
		.lanes_host = 16,
		.lane_worth = MIB,
	},
	/* A registration has a fixed cost, and the driver does one at a time, holding up everyone's
	 * copies: so one lane, large requests, and never beside lanes that copy. */
	[PATH_MAPPED] = {
		.name = "mapped",
		.what = "the page cache registered with the GPU, no copy by the CPU",
		.transport = TRANSPORT_FILE,
		.side = THROUGH,
		.queue = &queue_map_ops,
		.down = PATH_CACHED,
		.down_unasked = true,
		.size = 64 * MIB,
		.lanes = 1,
		.lane_worth = 64 * MIB,
	},
	/* Two pieces: one to be filled while another is copied from. */
	[PATH_CACHED] = {
		.name = "cached",
		.what = "pread or pwrite through the page cache",
		.transport = TRANSPORT_FILE,
		.side = THROUGH,
		.queue = &queue_sync_ops,
		.seen = true,
		.down = PATH_NONE,
		.size = 4 * MIB,
		.lanes = 12,
		.lanes_host = 16,
		.lane_worth = 2 * MIB,
		.pieces_max = 2,
		.pieces_first = 2,
	},
	[PATH_SYNTHETIC] = {
		.name = "synthetic",
		.what = "bytes of null: and pattern:, made up in memory",
		.transport = TRANSPORT_SYNTH,
		.side = AROUND,
		.queue = &queue_synth_ops,
		.tuned = true,
		.seen = true,
		.down = PATH_NONE,
		.lanes = 4,
		.lanes_host = 4,
		.lane_worth = MIB,
	},
};

const char *pen_path_name(unsigned int number, const char **what)
{
	if (number >= PATHS)
		return NULL;
	if (what)
		*what = path_kinds[number].what;
	return path_kinds[number].name;
}
