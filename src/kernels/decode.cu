/* SPDX-License-Identifier: MIT */
/*
 * Kernels that decode chunks of coded numbers (docs/coded.md) on their way to the GPU's memory. As
 * those of convert.cu they read the staging memory of the host themselves, over the bus, so nothing
 * is staged on the device. Their twin for cores is decode_run() in base/coding.c.
 *
 * A chunk is decoded by one warp, a block of its own: few of them fill the bus, so a launch may be
 * small. The bus wants whole lines and each byte asked for once, so everything is read as 16 bytes
 * by each lane, neighbours beside each other, and passes shared memory:
 *
 *   tail    planes B, C and D, which are read at places that only the planes before them tell. All
 *           of it comes first. A coded chunk is smaller than a plain one, so the tail is, too.
 *   stage   what the next values need of plane A and the planes of the rest. While it is decoded,
 *           the loads for those after it are on their way.
 *
 * A step is 512 values, 16 of them a lane's. How many escapes lie before a lane's is a prefix sum
 * over the warp, so the lane knows which codes of B are its own, and so on with C and D. A stream
 * that has more escapes than the table says reads codes that are not its own, from shared memory,
 * never beyond it, and fails by its checksum.
 *
 * The checksum is summed over the values as they are decoded; where it is not the one that was
 * told, the launch's verdict gets the chunk's number.
 */
#include "base/decode.h"
#include "base/floats.h"

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long s64;

#define CHUNK 16384
#define LANES 32
#define EACH 16			/* values of a lane in a step */
#define STEP (LANES * EACH)
#define ALL 0xffffffffu
/* Plain less rest, plane A and symbols is at most this, of every kind. */
#define TAIL_BYTES 12288

/* Bits below the symbol, bits of the symbol, and values in the stage at once. */
template <int Mantissa, int Symbol, int Values> struct kind {
	static constexpr int mantissa = Mantissa, symbol = Symbol, values = Values;
	static constexpr int rest = Mantissa + 1;
	static constexpr int bytes = (Mantissa + Symbol + 1) / 8;
	static constexpr int words = EACH * bytes / 4;	/* of a lane in a step */
	/* 16 bytes of the stage: planes of the rest, the widest first, then plane A. */
	static constexpr int units = values * (rest + 2) / 128;
	/* Loads of a lane for the planes of the rest; A takes one more. */
	static constexpr int rest_loads = (values * rest + 4095) / 4096;
	/* Bits of the rest in planes that are wider than this one, which come before it. */
	static constexpr __device__ int before(int width)
	{
		return rest & -2 * width;
	}
	/* A plain chunk passes the same memory, fewer values at once. */
	static constexpr int plain_values = values / 2;
	static constexpr int plain_units = plain_values * bytes / 16;
	static constexpr int plain_loads = plain_units / LANES;
};

typedef kind<7, 8, 2048> bf16;
typedef kind<23, 8, 1024> f32;
typedef kind<10, 5, 2048> f16;
typedef kind<3, 4, 2048> e4m3;
typedef kind<2, 5, 2048> e5m2;

/* Values stay as they are. */
struct same {
	static constexpr int bytes = 0;
};

template <typename From, typename To, To change(From)> struct changed {
	typedef To type;
	static constexpr int bytes = sizeof(To);
	static __device__ __forceinline__ To of(u32 number)
	{
		return change((From)number);
	}
};

/* Where the parts of a chunk lie, in 16 bytes from its begin. */
static __device__ __forceinline__ int filled(u32 values, u32 width)
{
	return (int)((values * width + 127) / 128);
}

static __device__ __forceinline__ u32 sum_before(u32 number, int lane, u32 *all)
{
	u32 sum = number;

#pragma unroll
	for (int distance = 1; distance < LANES; distance *= 2) {
		u32 other = __shfl_up_sync(ALL, sum, distance);

		if (lane >= distance)
			sum += other;
	}
	*all = __shfl_sync(ALL, sum, LANES - 1);
	return sum - number;
}

/* 32 bits of shared memory, from any bit on. */
static __device__ __forceinline__ u32 bits_at(const u32 *words, u32 bit)
{
	return __funnelshift_r(words[bit / 32], words[bit / 32 + 1], bit % 32);
}

static __device__ __forceinline__ u32 low_bits(u32 count)
{
	return count < 32 ? (1u << count) - 1 : ~0u;
}

static __device__ __forceinline__ u32 mix(u32 x)
{
	x = (x ^ x >> 16) * 0x85ebca6bu;
	return x ^ x >> 13;
}

/* ------------------------------------------------------------------------------ the values -- */

/* What the 16 values of a lane have in the planes of the rest. */
template <typename Kind> struct rest_bits {
	u32 words[(Kind::rest + 1) / 2];

	/* From planes of this width on; the lane's values begin at number `first` of the stage. */
	template <int Width>
	__device__ __forceinline__ void take(const unsigned char *stage, int first)
	{
		const unsigned char *own = stage + (Kind::values * Kind::before(Width) +
						    first * Width) / 8;

		if constexpr ((Kind::rest & Width) != 0 && Width == 1)
			words[Kind::before(1) / 2] =
				*reinterpret_cast<const unsigned short *>(own);
		if constexpr ((Kind::rest & Width) != 0) {
#pragma unroll
			for (int i = 0; i < Width / 2; i++)
				words[Kind::before(Width) / 2 + i] =
					reinterpret_cast<const u32 *>(own)[i];
		}
		if constexpr (Width > 1)
			take<Width / 2>(stage, first);
	}

	__device__ __forceinline__ u32 of(int i) const
	{
		u32 rest = 0;

#pragma unroll
		for (int width = 16; width; width /= 2)
			if (Kind::rest & width)
				rest |= (words[Kind::before(width) / 2 + i * width / 32] >>
						 i * width % 32 & ((1u << width) - 1))
					<< Kind::before(width);
		return rest;
	}
};

template <typename Kind> static __device__ __forceinline__ u32 join(u32 symbol, u32 rest)
{
	return rest >> Kind::mantissa << (Kind::bytes * 8 - 1) |
	       (symbol & ((1u << Kind::symbol) - 1)) << Kind::mantissa |
	       (rest & ((1u << Kind::mantissa) - 1));
}

/* The i-th value out of a lane's words, and into them. */
template <typename Kind> static __device__ __forceinline__ u32 value_of(const u32 *words, int i)
{
	u32 word = words[i * Kind::bytes / 4];

	if (Kind::bytes < 4)
		word = word >> i * Kind::bytes % 4 * 8 & ((1u << Kind::bytes % 4 * 8) - 1);
	return word;
}

template <int size>
static __device__ __forceinline__ void put_value(u32 *words, int i, u32 value)
{
	if (i * size % 4 == 0)
		words[i * size / 4] = value;
	else
		words[i * size / 4] |= value << i * size % 4 * 8;
}

/* A number of `size` bytes. */
template <int size> static __device__ __forceinline__ void store(unsigned char *to,
								 const unsigned char *from)
{
	if constexpr (size == 4)
		*reinterpret_cast<u32 *>(to) = *reinterpret_cast<const u32 *>(from);
	else if constexpr (size == 2)
		*reinterpret_cast<unsigned short *>(to) =
			*reinterpret_cast<const unsigned short *>(from);
	else
		*to = *from;
}

/* The row of the box that a value lies in, or behind. */
static __device__ __forceinline__ s64 row_of(const decode_launch &launch, s64 number)
{
	return launch.rows > 1 && number > 0 ? (s64)((u64)number / (u64)launch.pitch) : 0;
}

/* Where a value goes; NULL: it is not in the box. */
template <int size>
static __device__ __forceinline__ unsigned char *place_of(const decode_launch &launch, s64 row,
						       s64 column)
{
	return column < 0 || column >= launch.length || row >= launch.rows
		       ? nullptr
		       : launch.to + row * launch.memory_pitch + column * size;
}

/* Are none of a lane's values in the box? */
static __device__ __forceinline__ bool outside(const decode_launch &launch, s64 row, s64 column,
					       int left)
{
	if (column < 0)
		return column + EACH <= 0 || left <= 0;
	return left <= 0 || row >= launch.rows ||
	       (column >= launch.length &&
		(row + 1 >= launch.rows || launch.pitch - column >= EACH));
}

/* Values of a step one by one, out of shared memory, so that neighbours are stored beside each
 * other. The step's first has the number `first`. */
template <int size>
static __device__ __forceinline__ void deliver_mixed(const decode_launch &launch, s64 first,
						     int left, int lane, const uint4 *mixed)
{
	s64 row = row_of(launch, first), column = first - row * launch.pitch;

#pragma unroll 1
	for (int i = lane; i < STEP; i += LANES) {
		s64 there = column + i;
		u32 more = 0;
		unsigned char *to;

		/* Long divisions are slow. */
		if (launch.rows > 1 && there >= launch.pitch)
			more = launch.pitch >= STEP ? 1 : (u32)there / (u32)launch.pitch;
		to = place_of<size>(launch, row + more, there - more * launch.pitch);
		if (to && i < left)
			store<size>(to, reinterpret_cast<const unsigned char *>(mixed) + i * size);
	}
}

/*
 * Store the values of a step where the box has them; the lane's first has the number `first`, and
 * `left` of the chunk's come from there on. Where each lane's go to one place, or nowhere, 16 bytes
 * at once; else one by one.
 */
template <typename Kind, typename Form>
static __device__ __forceinline__ void deliver(const decode_launch &launch, s64 first, int left,
					       int lane, const u32 *words, uint4 *mixed)
{
	constexpr int size = Form::bytes ? Form::bytes : Kind::bytes;
	s64 row = row_of(launch, first), column = first - row * launch.pitch;
	unsigned char *to = place_of<size>(launch, row, column);
	bool wide = to && left >= EACH && launch.length - column >= EACH &&
		    reinterpret_cast<u64>(to) % 16 == 0, all;
	u32 out[EACH * size / 4];

#pragma unroll
	for (int i = 0; i < EACH; i++) {
		if constexpr (Form::bytes != 0)
			put_value<size>(out, i, Form::of(value_of<Kind>(words, i)));
		else if (i < Kind::words)
			out[i] = words[i];
	}
	all = __all_sync(ALL, wide);
	/* Of the columns of a rank a step has few, and most lanes have none. */
	if (!all)
		all = __all_sync(ALL, wide || outside(launch, row, column, left));
	uint4 *wide_to = all ? reinterpret_cast<uint4 *>(to) : mixed + lane * size;
#pragma unroll
	for (int i = 0; i < size; i++)
		if (wide || !all)
			wide_to[i] = make_uint4(out[i * 4], out[i * 4 + 1], out[i * 4 + 2],
						out[i * 4 + 3]);
	if (all)
		return;
	__syncwarp();
	deliver_mixed<size>(launch, first - lane * EACH, left + lane * EACH, lane, mixed);
	__syncwarp();
}

/* What a lane's words add to the checksum; values that there are not are zeros. */
template <typename Kind>
static __device__ __forceinline__ u32 sum_words(const u32 *words, int first, int left)
{
	u32 place = (u32)(first * Kind::bytes / 4) * 0x9e3779b1u, sum = 0;

#pragma unroll
	for (int i = 0; i < Kind::words; i++, place += 0x9e3779b1u)
		if (i * 4 < left * Kind::bytes)
			sum += mix(words[i] + place);
	return sum;
}

/* ----------------------------------------------------------------------------- coded chunks -- */

/* How far a warp is in planes B, C and D, and the symbols of the codes, a byte each. */
struct escapes {
	const u32 *tail;
	u32 c, d;		/* where these begin in the tail: bits, bytes */
	u32 b_taken, c_taken, d_taken;
	u32 of_a, of_b, of_c, of_c_more;
};

static __device__ __forceinline__ u32 byte_of(u32 low, u32 high, u32 number)
{
	return __byte_perm(low, high, number) & 0xff;
}

/* The symbols of a lane's codes in plane A, joined with their rest. */
template <typename Kind>
static __device__ __forceinline__ void decode_step(struct escapes *state, u32 codes,
						   const rest_bits<Kind> &rest, int left,
						   int lane, u32 *words)
{
	const unsigned char *bytes = reinterpret_cast<const unsigned char *>(state->tail);
	u32 count, all, b, d;
	u64 c;

	if (left < EACH)
		codes &= low_bits(left > 0 ? 2 * left : 0);
	count = __popc(codes & codes >> 1 & 0x55555555u);
	b = bits_at(state->tail, 2 * (state->b_taken + sum_before(count, lane, &all))) &
	    low_bits(2 * count);
	state->b_taken += all;

	count = __popc(b & b >> 1 & 0x55555555u);
	d = state->c + 3 * (state->c_taken + sum_before(count, lane, &all));
	c = bits_at(state->tail, d) | (u64)bits_at(state->tail, d + 32) << 32;
	state->c_taken += all;

	/* Of all codes of C, those that are not the lane's must not count as escapes. */
	c &= (1ull << 3 * count) - 1;
	count = __popcll(c & c >> 1 & c >> 2 & 0x249249249249ull);
	d = 0;
	if (__any_sync(ALL, count)) {
		d = state->d + state->d_taken + sum_before(count, lane, &all);
		state->d_taken += all;
	}
	/* Four symbols to a word. All of it unrolled would be a large program, and no faster. */
#pragma unroll
	for (int four = 0; four < EACH / 4; four++) {
		u32 symbols = 0;

#pragma unroll 1
		for (int i = 0; i < 4; i++, codes >>= 2) {
			u32 symbol = byte_of(state->of_a, 0, codes & 3);

			if ((codes & 3) == 3) {
				symbol = byte_of(state->of_b, 0, b & 3);
				if ((b & 3) == 3) {
					u32 code = (u32)c & 7;

					c >>= 3;
					symbol = byte_of(state->of_c, state->of_c_more, code);
					/* A stream may have more than its table says. */
					if (code == 7)
						symbol = bytes[min(d++, TAIL_BYTES - 1u)];
				}
				b >>= 2;
			}
			symbols = symbols >> 8 | symbol << 24;
		}
#pragma unroll
		for (int i = four * 4; i < four * 4 + 4; i++)
			put_value<Kind::bytes>(words, i,
					       i < left ? join<Kind>(byte_of(symbols, 0, i % 4),
								     rest.of(i))
							: 0);
	}
}

/* Of one plane: ask for the units that the stage holds next, `turn` times as many came before; and
 * put them there. `there` are those that the plane has in all. */
template <int Units>
static __device__ __forceinline__ void ask_plane(uint4 *asked, const uint4 *plane, int there,
						 int turn, int lane)
{
#pragma unroll
	for (int i = 0; i * LANES < Units; i++) {
		int unit = i * LANES + lane;

		if (unit < Units && turn * Units + unit < there)
			asked[i] = plane[turn * Units + unit];
	}
}

template <int Units>
static __device__ __forceinline__ void put_plane(uint4 *stage, const uint4 *asked, int lane)
{
#pragma unroll
	for (int i = 0; i * LANES < Units; i++)
		if (i * LANES + lane < Units)
			stage[i * LANES + lane] = asked[i];
}

/* The planes from one width on, then A. Unit 0 of a chunk has the symbols. */
template <typename Kind, int Width>
static __device__ __forceinline__ void ask(uint4 *asked, const uint4 *chunk, int count, int turn,
					   int lane, int begin = 1)
{
	if constexpr (Width == 0) {
		ask_plane<Kind::values / 64>(asked + Kind::rest_loads, chunk + begin,
					     filled(count, 2), turn, lane);
	} else if constexpr ((Kind::rest & Width) == 0) {
		ask<Kind, Width / 2>(asked, chunk, count, turn, lane, begin);
	} else {
		ask_plane<Kind::values * Width / 128>(
			asked + Kind::values * Kind::before(Width) / 4096, chunk + begin,
			filled(count, Width), turn, lane);
		ask<Kind, Width / 2>(asked, chunk, count, turn, lane,
				     begin + filled(count, Width));
	}
}

template <typename Kind, int Width>
static __device__ __forceinline__ void put(uint4 *stage, const uint4 *asked, int lane)
{
	if constexpr (Width == 0) {
		put_plane<Kind::values / 64>(stage + Kind::values * Kind::rest / 128,
					     asked + Kind::rest_loads, lane);
	} else {
		if constexpr ((Kind::rest & Width) != 0)
			put_plane<Kind::values * Width / 128>(
				stage + Kind::values * Kind::before(Width) / 128,
				asked + Kind::values * Kind::before(Width) / 4096, lane);
		put<Kind, Width / 2>(stage, asked, lane);
	}
}

/* ------------------------------------------------------------------------------- the chunks -- */

#define TAIL_AT_ONCE 4

/* Bring planes B, C and D into shared memory, and set out where they and the symbols are. */
static __device__ __forceinline__ void begin_coded(struct escapes *state, const decode_chunk &known,
						   const uint4 *chunk, int begin, uint4 symbols,
						   uint4 *tail, int lane)
{
	int b_units = filled(known.escapes[0], 2), c_units = filled(known.escapes[1], 3);
	int units = b_units + c_units + filled(known.escapes[2], 8);

	for (int unit = lane; unit < units; unit += TAIL_AT_ONCE * LANES) {
		uint4 asked[TAIL_AT_ONCE];

#pragma unroll
		for (int i = 0; i < TAIL_AT_ONCE; i++)
			if (unit + i * LANES < units)
				asked[i] = chunk[begin + unit + i * LANES];
#pragma unroll
		for (int i = 0; i < TAIL_AT_ONCE; i++)
			if (unit + i * LANES < units)
				tail[unit + i * LANES] = asked[i];
	}
	state->tail = reinterpret_cast<const u32 *>(tail);
	state->c = b_units * 128u;
	state->d = (b_units + c_units) * 16u;
	state->b_taken = state->c_taken = state->d_taken = 0;
	state->of_a = symbols.x;
	state->of_b = __byte_perm(symbols.x, symbols.y, 0x0543);
	state->of_c = __byte_perm(symbols.y, symbols.z, 0x5432);
	state->of_c_more = __byte_perm(symbols.z, symbols.w, 0x0432);
}

/* The words of a lane in a plain chunk; what fills up its end is nobody's. */
template <typename Kind>
static __device__ __forceinline__ void take_plain(const u32 *staged, int left, u32 *words)
{
#pragma unroll
	for (int i = 0; i < Kind::words; i++) {
		int missing = i * 4 + 4 - left * Kind::bytes;

		words[i] = missing <= 0	 ? staged[i]
			   : missing < 4 ? staged[i] & ~0u >> missing * 8
					 : 0;
	}
}

/* The bytes of the rest and of plane A, in units, and the symbols before them. */
template <typename Kind> static __device__ __forceinline__ int tail_begin(int count)
{
	int units = 1 + filled(count, 2);

#pragma unroll
	for (int width = 16; width; width /= 2)
		if (Kind::rest & width)
			units += filled(count, width);
	return units;
}

template <typename Kind, typename Form>
static __device__ __forceinline__ void decode(const decode_launch &launch)
{
	constexpr int units = Kind::units > Kind::plain_units ? Kind::units : Kind::plain_units;
	constexpr int size = Form::bytes ? Form::bytes : Kind::bytes;
	constexpr int loads = Kind::rest_loads + 1 > Kind::plain_loads ? Kind::rest_loads + 1
								       : Kind::plain_loads;
	__shared__ uint4 tail[TAIL_BYTES / 16], stage[units], mixed[LANES * size];
	const decode_chunk &known = launch.chunks[blockIdx.x];
	const uint4 *chunk = reinterpret_cast<const uint4 *>(launch.from + known.at);
	const bool coded = known.coded;
	const int lane = (int)threadIdx.x, left = (int)(launch.values - blockIdx.x * CHUNK);
	const int count = left < CHUNK ? left : CHUNK;
	const int at_once = coded ? Kind::values : Kind::plain_values;
	const s64 first = launch.first + (s64)blockIdx.x * CHUNK;
	const u32 *stage_a = reinterpret_cast<const u32 *>(stage + Kind::values * Kind::rest / 128);
	struct escapes state;
	uint4 asked[loads];
	u32 sum = 0;

	/* What the first values need is on its way while the tail is brought. */
	if (coded) {
		ask<Kind, 16>(asked, chunk, count, 0, lane);
		begin_coded(&state, known, chunk, tail_begin<Kind>(count), chunk[0], tail, lane);
	} else {
		ask_plane<Kind::plain_units>(asked, chunk, filled(count, Kind::bytes * 8), 0, lane);
	}
	for (int at = 0, turn = 1; at < count; turn++) {
		if (coded)
			put<Kind, 16>(stage, asked, lane);
		else
			put_plane<Kind::plain_units>(stage, asked, lane);
		__syncwarp();
		if (coded && at + at_once < count)
			ask<Kind, 16>(asked, chunk, count, turn, lane);
		else if (at + at_once < count)
			ask_plane<Kind::plain_units>(asked, chunk, filled(count, Kind::bytes * 8),
						     turn, lane);
#pragma unroll 1
		for (int step = 0; step < at_once && at < count; step += STEP, at += STEP) {
			int own = at + lane * EACH, staged = step + lane * EACH;
			u32 words[Kind::words];

			if (coded) {
				rest_bits<Kind> rest;

				rest.template take<16>(
					reinterpret_cast<const unsigned char *>(stage), staged);
				decode_step<Kind>(&state, stage_a[staged / EACH], rest, count - own,
						  lane, words);
			} else {
				take_plain<Kind>(reinterpret_cast<const u32 *>(stage) +
							 staged * Kind::bytes / 4,
						 count - own, words);
			}
			sum += sum_words<Kind>(words, own, count - own);
			deliver<Kind, Form>(launch, first + own, count - own, lane, words, mixed);
		}
		__syncwarp();
	}
#pragma unroll
	for (int distance = LANES / 2; distance; distance /= 2)
		sum += __shfl_xor_sync(ALL, sum, distance);
	if (lane == 0 && sum * 0xc2b2ae35u != known.checksum)
		*launch.verdict = launch.mark + blockIdx.x + 1;
}

#define DECODE(name, Kind, Form) \
	extern "C" __global__ void __launch_bounds__(LANES) \
	decode_##name(const __grid_constant__ decode_launch launch) \
	{ \
		decode<Kind, Form>(launch); \
	}
#define DECODE_TO(name, Kind, From, To) \
	typedef changed<From, To, floats_##name> form_##name; \
	DECODE(name, Kind, form_##name)

DECODE(bf16, bf16, same)
DECODE_TO(bf16_to_f16, bf16, floats_half, floats_half)
DECODE_TO(bf16_to_f32, bf16, floats_half, floats_single)
DECODE(f16, f16, same)
DECODE_TO(f16_to_bf16, f16, floats_half, floats_half)
DECODE_TO(f16_to_f32, f16, floats_half, floats_single)
DECODE(f32, f32, same)
DECODE_TO(f32_to_bf16, f32, floats_single, floats_half)
DECODE_TO(f32_to_f16, f32, floats_single, floats_half)
DECODE(e4m3, e4m3, same)
DECODE(e5m2, e5m2, same)
