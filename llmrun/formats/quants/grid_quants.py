"""IQ1, IQ2 and IQ3: groups of 8 or 4 weights that are stored as indices into a grid, a list of vectors.

Each vector of a grid can be read as a number in base 3 or 8. Every weight is a digit (its index in the levels of the
grid), and the first weight is the lowest digit. All grids are sorted by this number. A bitmap of the numbers that occur
is therefore enough to store a grid. It has 3^8 or 8^4 bits, lowest first, encoded with Python's `b85encode`.

IQ1_S and IQ1_M: groups of 8 weights, each a grid vector of -1, 0 and 1 shifted by plus or minus 1/8.

    IQ1_S, 50 bytes, 1.5625 bits per weight      IQ1_M, 56 bytes, 1.75 bits per weight

    offset  bytes  field                         offset  bytes  field
    0       2      scale  f16                    0       32     grid indices, low 8 bits
    2       32     grid indices, low 8 bits      32      16     nibbles
    34      16     groups  u16                   48      8      quarters  u16

    weight[i] = (scale * (2 * sub_scale[s] + 1)) * (grid[index[i / 8]][i % 8] + delta[d])

In IQ1_S, s = d = i / 32. In IQ1_M, s = i / 16 and d = i / 8. A delta is -1/8 if its bit is 1, and 1/8 otherwise.

In IQ1_S, each u16 of `groups` covers 32 weights and holds the high 3 bits of 4 grid indices, a 3-bit sub-scale, and the
delta bit. In IQ1_M, each nibble covers 8 weights and holds the high 3 bits of a grid index and the delta bit. Each u16
of `quarters` covers 64 weights and holds 4 sub-scales of 3 bits, then 4 bits of the f16 scale. The first quarter holds
the lowest bits of the scale. The low nibble of a byte comes first.

Scales have 11 significant bits, sub-scales have 4, and the sum of grid and delta has 4, so nothing is ever rounded.
The delta can therefore be part of the value instead of a minimum. An unpacked weight is
(scale / 8) * (2 sub_scale + 1) * (8 grid + 8 delta), where the last factor is an odd integer.

IQ2_XXS, IQ2_XS and IQ2_S: groups of 8 weights, each a grid vector with 8 signs.

    IQ2_XXS, 66 bytes, 2.0625 bits per weight  IQ2_XS, 74 bytes, 2.3125 bits per weight

    offset  bytes  field                       offset  bytes  field
    0       2      scale     f16               0       2      scale       f16
    2       64     8 groups                    2       64     eights      u16
                                               66      8      sub-scales

    IQ2_S, 82 bytes, 2.5625 bits per weight

    offset  bytes  field
    0       2      scale       f16
    2       32     grid indices, low 8 bits
    34      32     signs
    66      8      grid indices, high 2 bits
    74      8      sub-scales

    weight[i] = ((scale * (0.5 + sub_scale[s])) * 0.25) * grid[index[i / 8]][i % 8] * sign[i]

s is i / 32 in IQ2_XXS and i / 16 in the others. Scales have 11 significant bits, sub-scales 5 and magnitudes 6, so
nothing is ever rounded. The unpacked form (scale / 8) * (2 sub_scale + 1) * (magnitude * sign) is therefore equivalent.

In IQ2_XXS, a group of 32 weights is stored as two u32. The first holds 4 grid indices of one byte each. The second
holds 4 sets of 7 sign bits, then a 4-bit sub-scale. In IQ2_XS, each u16 of `eights` covers 8 weights and holds a 9-bit
grid index, then 7 sign bits.

IQ3_XXS and IQ3_S: groups of 4 weights, each a grid vector with 4 signs.

    IQ3_XXS, 98 bytes, 3.0625 bits per weight  IQ3_S, 110 bytes, 3.4375 bits per weight

    offset  bytes  field                       offset  bytes  field
    0       2      scale         f16           0       2      scale  f16
    2       64     grid indices                2       64     grid indices, low 8 bits
    66      32     8 groups      u32           66      8      grid indices, high bit
                                               74      32     signs
                                               106     4      sub-scales

    IQ3_XXS:  weight[i] = ((scale * (0.5 + sub_scale[i / 32])) * 0.5) * grid[index[i / 4]][i % 4] * sign[i]
    IQ3_S:    weight[i] = (scale * (1 + 2 * sub_scale[i / 32])) * grid[index[i / 4]][i % 4] * sign[i]

Scales have 11 significant bits, sub-scales have 5, and magnitudes have at most 5, so nothing is ever rounded. The
unpacked form of IQ3_XXS, (scale / 4) * (2 sub_scale + 1) * (magnitude * sign), is therefore equivalent. In IQ3_XXS,
each u32 of `groups` covers 32 weights and holds 4 sets of 7 sign bits, then a 4-bit sub-scale.

In IQ2 and IQ3, a sign bit is 1 for a negative weight. If only 7 sign bits are stored, the eighth has the value that
makes the number of negative weights even. IQ2_S and IQ3_S store all 8. Sign bits and 4-bit sub-scales are packed in
order, starting with the lowest bits of the first byte.
"""

from __future__ import annotations

from base64 import b85decode
from functools import cache

import numpy as np
from numpy.typing import NDArray

from llmrun.formats.quants.weight_type import (
    SUPER_BLOCK,
    Unpacked,
    blocks_of,
    halves,
    integer_type,
    joined,
    sequence,
    unsound_halves,
    words16,
    words32,
)

# The magnitudes of the weights in a grid. The IQ1 grid contains signed values instead.
_IQ2_LEVELS = (8, 25, 43)
_IQ3_XXS_LEVELS = (4, 12, 20, 28, 36, 44, 52, 62)
_IQ3_S_LEVELS = (1, 3, 5, 7, 9, 11, 13, 15)
_IQ1_LEVELS = (-1, 0, 1)


def iq2_xxs() -> NDArray[np.int8]:
    """Return the grid of IQ2_XXS, int8[256, 8]."""
    return _grid(_IQ2_XXS, _IQ2_LEVELS, 8)


def iq2_xs() -> NDArray[np.int8]:
    """Return the grid of IQ2_XS, int8[512, 8]."""
    return _grid(_IQ2_XS, _IQ2_LEVELS, 8)


def iq2_s() -> NDArray[np.int8]:
    """Return the grid of IQ2_S, int8[1024, 8]."""
    return _grid(_IQ2_S, _IQ2_LEVELS, 8)


def iq3_xxs() -> NDArray[np.int8]:
    """Return the grid of IQ3_XXS, int8[256, 4]."""
    return _grid(_IQ3_XXS, _IQ3_XXS_LEVELS, 4)


def iq3_s() -> NDArray[np.int8]:
    """Return the grid of IQ3_S, int8[512, 4]."""
    return _grid(_IQ3_S, _IQ3_S_LEVELS, 4)


def iq1() -> NDArray[np.int8]:
    """Return the grid that IQ1_S and IQ1_M share, int8[2048, 8]."""
    return _grid(_IQ1, _IQ1_LEVELS, 8)


@cache
def _grid(bits: str, levels: tuple[int, ...], width: int) -> NDArray[np.int8]:
    numbers = np.flatnonzero(np.unpackbits(np.frombuffer(b85decode(bits), np.uint8), bitorder="little"))
    digits = numbers[:, None] // len(levels) ** np.arange(width) % len(levels)
    grid: NDArray[np.int8] = np.array(levels, np.int8)[digits]
    grid.setflags(write=False)
    return grid


_IQ2_XXS = (
    "RTUIf5JW*i00b0701yBG00ck)6aYW~00004002-BKtT}z0Tcv4Py|2#5C8xL5C8yB0003106+i$K@<c)6chje1ONa8000C40000000a;K0000000"
    "00K1P~AaKmY_000aRL06;(h0RR91000350000001yN~1V8`)1ONa401yBG01yBG06+i`00000000001pxpA002M$000pH000000000100000KmY&"
    "$000yO000310R;d60000G5C8xG002+`0000000000KtTWi0YCr%002M$000C4KmY&$0000000000KmY(h00aO400004000000000000000000010"
    "000008kJ_K@boD6a)Ye06+i$00cw;06;(h06;(h0RR9%5C8!H000mG5C8xK5C8xG000000RR9100000000yO01yEH000001ONa401yEL00000000"
    "C4000C45JXS_000040RR92000C4000000RR9100000KmY&$00000002M%000310000000004000000RR9100a;O0000400000002M$00000000C4"
    "0000000000K>z>&0003106+i$002M$0000006+i$01yBG000pH000000000002BZK00004000000000000000000000RR9100000000000000000"
    "00000000002Ni000C406+i$00ck)1ONa4000001ONa40000002D+35CA{`00004000040000G000C4KmY&%0000$000000000000031000000000"
    "00096100000000C55Ci}K0000106+i$002M$0000000031000001OPw)0RR910000000001000000000000000000000000001yBG00001000000"
    "0000000000000000aO401yBG1ONa40RR910000000aO4000000000000aO400000000000000000000000000000000000000C4000001ONa4000"
    "0000000000000000000"
)
_IQ2_XS = (
    "RaI3{RYgG+MFCV*RZvAi5Cs7MR8bH>K?DE+0RT`{ML`u60TcuPP(?ui1px#E002Ni01yQL06+i$Kve}16a)bf06;(m0RRL506-7`009650RR9101"
    "yFGRZ&nyK|loo08~*BKtTWi0Z;%?5dc5{0096108m9i07U^11ONa)K>z>&0000006+i)00031000001qA>EKmY&)000pH000001ONa400000KmY&"
    "$003205I{iy00965P!Iq>5C9MW000mG0096100aO4L_q*R0RR91002M$000CK0000G0096200000000m{0R#X50RRvH1ONa40000G009610T2KH0"
    "02Y*08mv$K~)726a)ZJML_@s0RTh*KtMqOKmh;%0000$6-5CQ1ON~K0RRO75Ci}K002M$0RaF&5C8xG000yO01yEI0RR911P}lKK>$Di002M$000"
    "0000000P(?uy1pxpA002Ni1ONp900000KmY&$5C8xG002M*0R#j95I_I`0YLx&0000$5C8xG01yBG01yBG1Oz|;KtKQh0003101!X{0000000000"
    "00000KmY(hK>z>&5D)+X08jt`0000000000000mG1ONa40RRC&000000000000aOK0RR9101yBG00000000005C8xG000010000000aO40000000"
    "aO401yxW002N01pyTV08jt`P!$0H1P}xO0000100aO406+l%K@?N~5CA{`KmY&)0000100000KmY&)000000RR9H1ONm8009&L00aa8000000000"
    "0000C4000mK1P}!Q00aO5009610RRvH00031000000000406+i$L;wH)K@b1{0000001yBG000yK000000RR910000000004000001ONa4009610"
    "00005C8xG5C8xG07U@=1ONa4000310000$5C8xGKokK05C8xG0RRL5002M$0000$0000000000000000000006+i$1OPw)MF0Q*002M`1ONa4000"
    "050000000jU5000310R"
)
_IQ2_S = (
    "RaI3{RYg@51rb$MQBXxy6a^I&R8bI6RRjPL5fD&SMO9T*6;wr0P*qhFRaF#JQ4l~?1OQPK1W*tFKowOHRaH?C0Rcb-RRly)5I{fx009&b1rPuL06"
    "+j#RZ&qzRTULc6jW7JMO76ARTKbF6hT1*1ppKT08m9$6jfCeR8bH>RTTwQ6a-KZ06-K40TcuP5C8x`RZ#>~Q4l}@0031K1W*tF5C8xK5Ci}a00aO"
    "4002}`6;VM21OX8MR8T=c1qA^V1ON~a08s=1000F5L{$_8RTKnJ5CA|F1pyQU01*HH00jX61ONm80000H6aY{V002M$02KrP0000001yBG1V8`)0"
    "0ck*08mv`MO9T56hu)_MO6h=RTNZF5I{i{1W^<OPyhfxRaI3~RZ&nyK>$@%6jV_VP(c6yRTKnJ5CA{`01y;aQBXxe00aR5R8bH>K>z>&Kmbq>06+"
    "i$00000P(@W0RaF#JQ2;<y6$Mok1W*tFKokW56a)Yi00010RTNZF5I{iy096zOP!Iq>0000K1OO2L0000008~*BKtVtN0RR9{5CA{`0000001yBW"
    "00000KmY(lMHK~66a+vJ06-N50TcuP5C9MW1OWg90096100B`H1W*tFKmY&$6a)Ye5C9MW1ONm800000000mGP!IqB000mG009sH06+i$0000000"
    "0001ONa406;($MG+KK5fDKE07X?4R8asxK>$Dz6#!5W0000008~{GP(?ui1pxq5Q4l~u0003208kJBPyhe`0000GK>+{-0RR91KtKTi0096%0000"
    "0000C400lq*00Bi+5L8hRKtTWi5flJW5D)+W000yO01yBG0000$R8bH>K>z>&Kmbq>06+i$0000H5C8xG5C9MW002Ni01yEH00000Pyhe`01*HH0"
    "000000000002M$01*)oR1g3F000C5000mG00aO401yN~6aWAKL;(O%5CA{`00001Ko9^B0000000000000001ONa4002M$KmY&$0000100000KmY"
    "&)002M%6afGL01yBG0R"
)
_IQ3_XXS = (
    "6^aD{1ONai3I!qs0uTTJ6#@l{0D=G@f(0M|0000100;np5P$$Ef&c&n00aO40000W000mG08sz{2mk^A3Iz%kfB^si1p);C000003IzfI000041p"
    "om8Kmb4hA^-pY00961000pHKmY&&AOHXW00000000C40RR911qww11ONa4Dg^=o004*q1%d^D0U!VX0ucZJ0000H0000W00;m82mpWp0ssII0000"
    "0000003P1n=AOHXW0tE^H00AHb1pom8Pyhe`3IQMh00aO800ICA0000000001fB*mlK>!2*03ZMW01yB`000O800008000315P$%n0Ehqp000000"
    "000G0004i0RTY&fB*mhAOHXW5C8xG00IyI001BW2mk;90000000000AO!#c0000000aO40ssI3K>$Di03ZMW01yBK000041ONa400;m800D>q000"
    "041ONa6000000000000961000mG1ONa4000mGPyi4B00062000620Du4h000mG0000%00000000005C8xGAOHXW00aO400008000002mk^A00000"
    "r~v>300aO4002M$0RR9100aO4AOrva0U!Vf00031000620ssI21pp8L0000000001000000000000000"
)
_IQ3_S = (
    "r&l8gr3wX-7bA%x5C9?sqe&tWqzV8D2qFba5CwoD0f-U=2?78C6aYmCq5wb$Knef?00aO66#zvD01*HH7pnzQ08j!1OA!JI0tEm;0i+QG2_OLkk_"
    "mzl0ssU7C=>t+L=gZ00to^I00IC2005ByPyhe`3Izfn0ssU7t5u2xDg}Tk1&JgQ1Ofm6k^l;U0*C+-B?1%*1OY$*f&d950ssIc5CQ~%0SEvAg#ZE"
    "o03ZSYAOb)E2mt^91gZoolmZ9>Di8_)0RRC+0R#aQ009610uhP<iXZ?82tot`00a>L0tFxh5I_J306+i$0ssI23IGKl000005d@J00s#O4gbD;92"
    "qFLg3Lydr0e}Pn5DEn%000001pp9$0RR93pa22@000C400;mO0003103iSY2m$~A1Q7%Pkpw^xDg*)q000040Rjj?00;m8gaLp65CR|w5&!`NKmY"
    "&$00ck)015yA000001ONa46aWMO0000004e|q000310RVvj000mG00aOK1Rw+f0T2QJ0RR91001BW2mk~C2><{P00031AOHXW0RR91015yA00000"
    "kpKli0T2WL1OgBMC;$Ke5<vn100IC21ONae00;m8A_xHh00961000C41ONa41ONa6000000RR9100000"
)
_IQ1 = (
    "RV5UKpaMcs2t_fdh9HWf8VD*N6opU}f*?diB^3pr0)ilj7yt-@paUwPh`Xu^kg5v+A^-}ijDnyDKv4)qA&7ub6hcu5iZBS6pa_5}2t^?jg&;^mRR"
    "~1^EW)55iY5RmB&e#Q2;#2@2q-83paMcDswg0+fFKH+2)VkbAj+<ZqOPhseCz7EyMhk5BD%`c4w3>Q03sl$in<Dd0tf&qO5mb9A|NZG0D(Y(s){H"
    "GA^{YIP!)n82}L1Pg`fxmBd9tcgn}ScLQx2!APALE6ap#;xTu1FphyBB2!f($q5>$ZDhP!j2!b#OML+;WAryt6076j!MFA;-0E&Vt2%#_(1yB@%C"
    "<sL%6onuH0wAg?03Z^vimoWAx}mD5Z~%e|2m&Y~0)zm907!tK>aZ%R!XS&fBI??wi;HfklCUbOa*K*Y3@RW<gg_{YDhR3|$jqW5qOY2u=%@k!0st"
    "zghyWmfpo^lSD7v74f-(xazPP&n>!P45q6mr#DC(jBp)vvt`lRaK?<=S-jlO>C`uBgo=6$-}Y5OPtzb5(;>EVhZ5URcogsKR#s0)Iw|GFgUgMb8L"
    "ENJqm3ZyFl0xAdy;;Iq=0)i?ErXb0JiI9RQ0HOelfD-_M2nYadimIx+0;ax-pvnS(YnLw2vgr_l5H70TC>7DA1ON(x0E&Vj2mzrWf~q;XA~J-a34"
    "j;?ilSlyffPhh07W6Jf>0DfQ3$FaD5{4F5-JEqAru9m2trW^MFAiJpg^J`0Ehqxq6lh=Zn&zdfB+y0g5t;`AqYfJ6hcu6iXat*P!xs=2&yV7fB*_"
    "YQ3ypLr~ptDLQx3fAc%qr7=kJYs-miju!{l;DykqTf`F<DC<rJ3sfYq1puP(zxCn~6OR}#2x}^B7svuG*Xttm*=70(UC<r2IVt^nD0;;Mjs_LStp"
    "rQx}5Fnt6A^?I807W4bg`f&RQ3ypLsRjT_ssae501ypC6oM!SMIjUg00@GDtnwfL0062AC<?kD>Y@Swf=CG{=@bAFOGQxtMFFS+P!vK@2#6#Ih$s"
    "p`2mnO^6a}CHKv4)q0R"
)


# --- signs: one bit per weight, 1 if it is negative -------------------------------------------------------------------

# Some types store only 7 sign bits for 8 weights. The eighth has the value that makes the number of negative weights
# even.
_EIGHT_BITS = np.array([seven | (seven.bit_count() % 2) << 7 for seven in range(128)], np.uint8)


def signs(bits: NDArray[np.uint8]) -> NDArray[np.int8]:
    """Convert sign bits, lowest first, to factors of 1 and -1: uint8[...] -> int8[..., 8]."""
    is_negative = (bits[..., None] >> np.arange(8, dtype=np.uint8)) & np.uint8(1)
    return np.int8(1) - np.int8(2) * is_negative.astype(np.int8)


def even_signs(seven_bits: NDArray[np.integer]) -> NDArray[np.int8]:
    """Convert 7 stored sign bits (0 to 127) to 8 factors of 1 and -1: integers[...] -> int8[..., 8]."""
    return signs(_EIGHT_BITS[seven_bits])


IQ1_S_BYTES = 50
IQ1_M_BYTES = 56

_THREES = np.array([0, 3, 6, 9], np.uint16)  # bit offsets of the four 3-bit numbers in a group or quarter


def unpack_iq1_s(raw: NDArray[np.uint8]) -> Unpacked:
    """Unpack uint8[..., 50 n] -> 256 n weights.

    Values are -9, -7, -1, 1, 7 or 9. Each group of 32 weights has an odd sub-scale of 1 to 15.
    """
    blocks = blocks_of(raw, IQ1_S_BYTES)
    groups = words16(blocks[..., 34:])
    high_bits = (groups[..., None] >> _THREES) & np.uint16(7)
    low_bits = blocks[..., 2:34].reshape(high_bits.shape)
    is_down = (groups >> np.uint16(15))[..., None]
    return joined(
        raw.ndim - 1,
        _eighths(low_bits, high_bits, is_down),
        super_scales=halves(blocks[..., :2], 1 / 8),
        sub_scales=_odd((groups >> np.uint16(12)) & np.uint16(7)),
        super_block=SUPER_BLOCK,
        sub_block=32,
    )


def unpack_iq1_m(raw: NDArray[np.uint8]) -> Unpacked:
    """Unpack uint8[..., 56 n] -> 256 n weights.

    Values are -9, -7, -1, 1, 7 or 9. Each group of 16 weights has an odd sub-scale of 1 to 15.
    """
    blocks = blocks_of(raw, IQ1_M_BYTES)
    nibbles, quarters = sequence(blocks[..., 32:48], 4).astype(np.uint16), words16(blocks[..., 48:])
    parts = (quarters >> np.uint16(12)) << np.array([0, 4, 8, 12], np.uint16)
    scale = np.bitwise_or.reduce(parts, axis=-1, keepdims=True).astype("<u2")
    return joined(
        raw.ndim - 1,
        _eighths(blocks[..., :32], nibbles & np.uint16(7), nibbles >> np.uint16(3)),
        super_scales=halves(scale.view(np.uint8), 1 / 8),
        sub_scales=_odd((quarters[..., None] >> _THREES) & np.uint16(7)),
        super_block=SUPER_BLOCK,
        sub_block=16,
    )


def _eighths(
    low_bits: NDArray[np.uint8], high_bits: NDArray[np.uint16], is_down: NDArray[np.uint16]
) -> NDArray[np.int8]:
    """Return the grid vectors shifted by delta, times 8: [...] -> int8[..., 8]. The arguments broadcast together."""
    vectors = iq1()[low_bits | (high_bits << np.uint16(8))]
    deltas = np.int8(1) - np.int8(2) * is_down.astype(np.int8)
    return np.int8(8) * vectors + deltas[..., None]


def _odd(sub_scales: NDArray[np.uint16]) -> NDArray[np.int16]:
    return 2 * sub_scales.astype(np.int16) + np.int16(1)


def _unsound_iq1_m(blocks: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Return a mask of the blocks whose f16 scale, assembled from the highest 4 bits of four words, is not finite."""
    high = (words16(blocks[:, 48:56]) >> np.uint16(12)) << np.array([0, 4, 8, 12], np.uint16)
    return unsound_halves(np.bitwise_or.reduce(high, axis=1))


IQ2_XXS_BYTES = 66
IQ2_XS_BYTES = 74
IQ2_S_BYTES = 82


def unpack_iq2_xxs(raw: NDArray[np.uint8]) -> Unpacked:
    """Unpack uint8[..., 66 n] -> 256 n weights.

    Values are -43 to 43, never 0. Each group of 32 weights has an odd sub-scale of 1 to 31.
    """
    blocks = blocks_of(raw, IQ2_XXS_BYTES)
    groups = blocks[..., 2:].reshape(*blocks.shape[:-1], 8, 8)
    indices, rest = groups[..., :4], words32(groups[..., 4:])
    seven_bits = (rest >> np.array([0, 7, 14, 21], np.uint32)) & np.uint32(127)
    values = iq2_xxs()[indices] * even_signs(seven_bits)
    return _unpacked(raw.ndim - 1, values, blocks, rest >> np.uint32(28), sub_block=32)


def unpack_iq2_xs(raw: NDArray[np.uint8]) -> Unpacked:
    """Unpack uint8[..., 74 n] -> 256 n weights.

    Values are -43 to 43, never 0. Each group of 16 weights has an odd sub-scale of 1 to 31.
    """
    blocks = blocks_of(raw, IQ2_XS_BYTES)
    eights = words16(blocks[..., 2:66])
    values = iq2_xs()[eights & np.uint16(511)] * even_signs(eights >> np.uint16(9))
    return _unpacked(raw.ndim - 1, values, blocks, sequence(blocks[..., 66:], 4), sub_block=16)


def unpack_iq2_s(raw: NDArray[np.uint8]) -> Unpacked:
    """Unpack uint8[..., 82 n] -> 256 n weights.

    Values are -43 to 43, never 0. Each group of 16 weights has an odd sub-scale of 1 to 31.
    """
    blocks = blocks_of(raw, IQ2_S_BYTES)
    indices = blocks[..., 2:34] | (sequence(blocks[..., 66:74], 2).astype(np.uint16) << np.uint16(8))
    values = iq2_s()[indices] * signs(blocks[..., 34:66])
    return _unpacked(raw.ndim - 1, values, blocks, sequence(blocks[..., 74:], 4), sub_block=16)


def _unpacked(
    n_rows_axes: int,
    values: NDArray[np.int8],
    blocks: NDArray[np.uint8],
    sub_scales: NDArray[np.unsignedinteger],
    *,
    sub_block: int,
) -> Unpacked:
    return joined(
        n_rows_axes,
        values,
        super_scales=halves(blocks[..., :2], 1 / 8),
        sub_scales=2 * sub_scales.astype(np.int16) + 1,
        super_block=SUPER_BLOCK,
        sub_block=sub_block,
    )


IQ3_XXS_BYTES = 98
IQ3_S_BYTES = 110


def unpack_iq3_xxs(raw: NDArray[np.uint8]) -> Unpacked:
    """Unpack uint8[..., 98 n] -> 256 n weights.

    Values are -62 to 62, never 0. Each group of 32 weights has an odd sub-scale of 1 to 31.
    """
    blocks = blocks_of(raw, IQ3_XXS_BYTES)
    groups = words32(blocks[..., 66:])
    seven_bits = (groups[..., None] >> np.array([0, 7, 14, 21], np.uint32)) & np.uint32(127)
    sub_scales = 2 * (groups >> np.uint32(28)).astype(np.int16) + 1
    magnitudes = iq3_xxs()[blocks[..., 2:66]]
    return joined(
        raw.ndim - 1,
        magnitudes * even_signs(seven_bits).reshape(magnitudes.shape),
        super_scales=halves(blocks[..., :2], 1 / 4),
        sub_scales=sub_scales,
        super_block=SUPER_BLOCK,
        sub_block=32,
    )


def unpack_iq3_s(raw: NDArray[np.uint8]) -> Unpacked:
    """Unpack uint8[..., 110 n] -> 256 n weights.

    Values are odd, -15 to 15. Each group of 32 weights has an odd sub-scale of 1 to 31.
    """
    blocks = blocks_of(raw, IQ3_S_BYTES)
    indices = blocks[..., 2:66] | (sequence(blocks[..., 66:74], 1).astype(np.uint16) << np.uint16(8))
    magnitudes = iq3_s()[indices]
    return joined(
        raw.ndim - 1,
        magnitudes * signs(blocks[..., 74:106]).reshape(magnitudes.shape),
        super_scales=halves(blocks[..., :2]),
        sub_scales=2 * sequence(blocks[..., 106:], 4).astype(np.int16) + 1,
        super_block=SUPER_BLOCK,
        sub_block=32,
    )


TYPES = (
    integer_type("IQ1_S", 19, SUPER_BLOCK, IQ1_S_BYTES, unpack_iq1_s, half_fields=(0,)),
    integer_type("IQ1_M", 29, SUPER_BLOCK, IQ1_M_BYTES, unpack_iq1_m, other_scales=_unsound_iq1_m),
    integer_type("IQ2_XXS", 16, SUPER_BLOCK, IQ2_XXS_BYTES, unpack_iq2_xxs, half_fields=(0,)),
    integer_type("IQ2_XS", 17, SUPER_BLOCK, IQ2_XS_BYTES, unpack_iq2_xs, half_fields=(0,)),
    integer_type("IQ2_S", 22, SUPER_BLOCK, IQ2_S_BYTES, unpack_iq2_s, half_fields=(0,)),
    integer_type("IQ3_XXS", 18, SUPER_BLOCK, IQ3_XXS_BYTES, unpack_iq3_xxs, half_fields=(0,)),
    integer_type("IQ3_S", 21, SUPER_BLOCK, IQ3_S_BYTES, unpack_iq3_s, half_fields=(0,)),
)
