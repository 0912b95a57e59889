r"""Compiles the patterns of pre-tokenizers into transition tables, for a kernel that does one lookup per character.

The patterns are a subset of regular expressions. The subset consists of literals, `\r \n \t`, escaped punctuation,
`\s \S \p{..}` (with the names in NAMED), `[...]` with ranges, `^` and one `&&[...]`, `(?:...)`, `|`, the greedy
quantifiers `? * + {n} {m,n}`, and the lookahead `(?!\S)`, which matches before whitespace and at the end.

A table finds the match that a backtracking matcher would find first, although the kernel never backtracks. The table
is a DFA that precomputes Thompson's NFA simulation. A state is the list of positions in the pattern that may come next,
in order of preference. When one position reaches the end of the pattern, all later positions in the list are dropped.
The match ends where the end of the pattern was last reached. A lookahead depends on the character after the match, so a
match is recorded one step late, as a flag of the transition.

A set of code points is a sorted int64 array of the code points at which membership changes, starting with the first
member. For example, `[A-C]` is [0x41, 0x44].

The named sets are those of Unicode 15.1, the version that llama.cpp uses. A fixed version makes token ids independent
of the Unicode version of the interpreter and of libraries. For example, Unicode 17.0 assigns about 23,000 code points
that are unassigned in 15.1. The sets are the general categories L, N, P, M, S and C (without unassigned code points),
and the property White_Space. All ranges are in hexadecimal and include both ends.
Source: the Unicode Character Database.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence as Ordered
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct

from llmrun.formats.layouts.tokens import ENDS_HERE, NO_WAY_ON, ROW_SHIFT

if TYPE_CHECKING:
    from numpy.typing import NDArray

LETTERS = """
41-5A 61-7A AA B5 BA C0-D6 D8-F6 F8-2C1 2C6-2D1 2E0-2E4 2EC 2EE 370-374 376-377 37A-37D 37F 386 388-38A
38C 38E-3A1 3A3-3F5 3F7-481 48A-52F 531-556 559 560-588 5D0-5EA 5EF-5F2 620-64A 66E-66F 671-6D3 6D5
6E5-6E6 6EE-6EF 6FA-6FC 6FF 710 712-72F 74D-7A5 7B1 7CA-7EA 7F4-7F5 7FA 800-815 81A 824 828 840-858
860-86A 870-887 889-88E 8A0-8C9 904-939 93D 950 958-961 971-980 985-98C 98F-990 993-9A8 9AA-9B0 9B2
9B6-9B9 9BD 9CE 9DC-9DD 9DF-9E1 9F0-9F1 9FC A05-A0A A0F-A10 A13-A28 A2A-A30 A32-A33 A35-A36 A38-A39
A59-A5C A5E A72-A74 A85-A8D A8F-A91 A93-AA8 AAA-AB0 AB2-AB3 AB5-AB9 ABD AD0 AE0-AE1 AF9 B05-B0C B0F-B10
B13-B28 B2A-B30 B32-B33 B35-B39 B3D B5C-B5D B5F-B61 B71 B83 B85-B8A B8E-B90 B92-B95 B99-B9A B9C B9E-B9F
BA3-BA4 BA8-BAA BAE-BB9 BD0 C05-C0C C0E-C10 C12-C28 C2A-C39 C3D C58-C5A C5D C60-C61 C80 C85-C8C C8E-C90
C92-CA8 CAA-CB3 CB5-CB9 CBD CDD-CDE CE0-CE1 CF1-CF2 D04-D0C D0E-D10 D12-D3A D3D D4E D54-D56 D5F-D61
D7A-D7F D85-D96 D9A-DB1 DB3-DBB DBD DC0-DC6 E01-E30 E32-E33 E40-E46 E81-E82 E84 E86-E8A E8C-EA3 EA5
EA7-EB0 EB2-EB3 EBD EC0-EC4 EC6 EDC-EDF F00 F40-F47 F49-F6C F88-F8C 1000-102A 103F 1050-1055 105A-105D
1061 1065-1066 106E-1070 1075-1081 108E 10A0-10C5 10C7 10CD 10D0-10FA 10FC-1248 124A-124D 1250-1256 1258
125A-125D 1260-1288 128A-128D 1290-12B0 12B2-12B5 12B8-12BE 12C0 12C2-12C5 12C8-12D6 12D8-1310 1312-1315
1318-135A 1380-138F 13A0-13F5 13F8-13FD 1401-166C 166F-167F 1681-169A 16A0-16EA 16F1-16F8 1700-1711
171F-1731 1740-1751 1760-176C 176E-1770 1780-17B3 17D7 17DC 1820-1878 1880-1884 1887-18A8 18AA 18B0-18F5
1900-191E 1950-196D 1970-1974 1980-19AB 19B0-19C9 1A00-1A16 1A20-1A54 1AA7 1B05-1B33 1B45-1B4C 1B83-1BA0
1BAE-1BAF 1BBA-1BE5 1C00-1C23 1C4D-1C4F 1C5A-1C7D 1C80-1C88 1C90-1CBA 1CBD-1CBF 1CE9-1CEC 1CEE-1CF3
1CF5-1CF6 1CFA 1D00-1DBF 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D
1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2071 207F
2090-209C 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 212A-212D 212F-2139 213C-213F 2145-2149 214E
2183-2184 2C00-2CE4 2CEB-2CEE 2CF2-2CF3 2D00-2D25 2D27 2D2D 2D30-2D67 2D6F 2D80-2D96 2DA0-2DA6 2DA8-2DAE
2DB0-2DB6 2DB8-2DBE 2DC0-2DC6 2DC8-2DCE 2DD0-2DD6 2DD8-2DDE 2E2F 3005-3006 3031-3035 303B-303C 3041-3096
309D-309F 30A1-30FA 30FC-30FF 3105-312F 3131-318E 31A0-31BF 31F0-31FF 3400-4DBF 4E00-A48C A4D0-A4FD
A500-A60C A610-A61F A62A-A62B A640-A66E A67F-A69D A6A0-A6E5 A717-A71F A722-A788 A78B-A7CA A7D0-A7D1 A7D3
A7D5-A7D9 A7F2-A801 A803-A805 A807-A80A A80C-A822 A840-A873 A882-A8B3 A8F2-A8F7 A8FB A8FD-A8FE A90A-A925
A930-A946 A960-A97C A984-A9B2 A9CF A9E0-A9E4 A9E6-A9EF A9FA-A9FE AA00-AA28 AA40-AA42 AA44-AA4B AA60-AA76
AA7A AA7E-AAAF AAB1 AAB5-AAB6 AAB9-AABD AAC0 AAC2 AADB-AADD AAE0-AAEA AAF2-AAF4 AB01-AB06 AB09-AB0E
AB11-AB16 AB20-AB26 AB28-AB2E AB30-AB5A AB5C-AB69 AB70-ABE2 AC00-D7A3 D7B0-D7C6 D7CB-D7FB F900-FA6D
FA70-FAD9 FB00-FB06 FB13-FB17 FB1D FB1F-FB28 FB2A-FB36 FB38-FB3C FB3E FB40-FB41 FB43-FB44 FB46-FBB1
FBD3-FD3D FD50-FD8F FD92-FDC7 FDF0-FDFB FE70-FE74 FE76-FEFC FF21-FF3A FF41-FF5A FF66-FFBE FFC2-FFC7
FFCA-FFCF FFD2-FFD7 FFDA-FFDC 10000-1000B 1000D-10026 10028-1003A 1003C-1003D 1003F-1004D 10050-1005D
10080-100FA 10280-1029C 102A0-102D0 10300-1031F 1032D-10340 10342-10349 10350-10375 10380-1039D
103A0-103C3 103C8-103CF 10400-1049D 104B0-104D3 104D8-104FB 10500-10527 10530-10563 10570-1057A
1057C-1058A 1058C-10592 10594-10595 10597-105A1 105A3-105B1 105B3-105B9 105BB-105BC 10600-10736
10740-10755 10760-10767 10780-10785 10787-107B0 107B2-107BA 10800-10805 10808 1080A-10835 10837-10838
1083C 1083F-10855 10860-10876 10880-1089E 108E0-108F2 108F4-108F5 10900-10915 10920-10939 10980-109B7
109BE-109BF 10A00 10A10-10A13 10A15-10A17 10A19-10A35 10A60-10A7C 10A80-10A9C 10AC0-10AC7 10AC9-10AE4
10B00-10B35 10B40-10B55 10B60-10B72 10B80-10B91 10C00-10C48 10C80-10CB2 10CC0-10CF2 10D00-10D23
10E80-10EA9 10EB0-10EB1 10F00-10F1C 10F27 10F30-10F45 10F70-10F81 10FB0-10FC4 10FE0-10FF6 11003-11037
11071-11072 11075 11083-110AF 110D0-110E8 11103-11126 11144 11147 11150-11172 11176 11183-111B2
111C1-111C4 111DA 111DC 11200-11211 11213-1122B 1123F-11240 11280-11286 11288 1128A-1128D 1128F-1129D
1129F-112A8 112B0-112DE 11305-1130C 1130F-11310 11313-11328 1132A-11330 11332-11333 11335-11339 1133D
11350 1135D-11361 11400-11434 11447-1144A 1145F-11461 11480-114AF 114C4-114C5 114C7 11580-115AE
115D8-115DB 11600-1162F 11644 11680-116AA 116B8 11700-1171A 11740-11746 11800-1182B 118A0-118DF
118FF-11906 11909 1190C-11913 11915-11916 11918-1192F 1193F 11941 119A0-119A7 119AA-119D0 119E1 119E3
11A00 11A0B-11A32 11A3A 11A50 11A5C-11A89 11A9D 11AB0-11AF8 11C00-11C08 11C0A-11C2E 11C40 11C72-11C8F
11D00-11D06 11D08-11D09 11D0B-11D30 11D46 11D60-11D65 11D67-11D68 11D6A-11D89 11D98 11EE0-11EF2 11F02
11F04-11F10 11F12-11F33 11FB0 12000-12399 12480-12543 12F90-12FF0 13000-1342F 13441-13446 14400-14646
16800-16A38 16A40-16A5E 16A70-16ABE 16AD0-16AED 16B00-16B2F 16B40-16B43 16B63-16B77 16B7D-16B8F
16E40-16E7F 16F00-16F4A 16F50 16F93-16F9F 16FE0-16FE1 16FE3 17000-187F7 18800-18CD5 18D00-18D08
1AFF0-1AFF3 1AFF5-1AFFB 1AFFD-1AFFE 1B000-1B122 1B132 1B150-1B152 1B155 1B164-1B167 1B170-1B2FB
1BC00-1BC6A 1BC70-1BC7C 1BC80-1BC88 1BC90-1BC99 1D400-1D454 1D456-1D49C 1D49E-1D49F 1D4A2 1D4A5-1D4A6
1D4A9-1D4AC 1D4AE-1D4B9 1D4BB 1D4BD-1D4C3 1D4C5-1D505 1D507-1D50A 1D50D-1D514 1D516-1D51C 1D51E-1D539
1D53B-1D53E 1D540-1D544 1D546 1D54A-1D550 1D552-1D6A5 1D6A8-1D6C0 1D6C2-1D6DA 1D6DC-1D6FA 1D6FC-1D714
1D716-1D734 1D736-1D74E 1D750-1D76E 1D770-1D788 1D78A-1D7A8 1D7AA-1D7C2 1D7C4-1D7CB 1DF00-1DF1E
1DF25-1DF2A 1E030-1E06D 1E100-1E12C 1E137-1E13D 1E14E 1E290-1E2AD 1E2C0-1E2EB 1E4D0-1E4EB 1E7E0-1E7E6
1E7E8-1E7EB 1E7ED-1E7EE 1E7F0-1E7FE 1E800-1E8C4 1E900-1E943 1E94B 1EE00-1EE03 1EE05-1EE1F 1EE21-1EE22
1EE24 1EE27 1EE29-1EE32 1EE34-1EE37 1EE39 1EE3B 1EE42 1EE47 1EE49 1EE4B 1EE4D-1EE4F 1EE51-1EE52 1EE54
1EE57 1EE59 1EE5B 1EE5D 1EE5F 1EE61-1EE62 1EE64 1EE67-1EE6A 1EE6C-1EE72 1EE74-1EE77 1EE79-1EE7C 1EE7E
1EE80-1EE89 1EE8B-1EE9B 1EEA1-1EEA3 1EEA5-1EEA9 1EEAB-1EEBB 20000-2A6DF 2A700-2B739 2B740-2B81D
2B820-2CEA1 2CEB0-2EBE0 2EBF0-2EE5D 2F800-2FA1D 30000-3134A 31350-323AF
"""

NUMBERS = """
30-39 B2-B3 B9 BC-BE 660-669 6F0-6F9 7C0-7C9 966-96F 9E6-9EF 9F4-9F9 A66-A6F AE6-AEF B66-B6F B72-B77
BE6-BF2 C66-C6F C78-C7E CE6-CEF D58-D5E D66-D78 DE6-DEF E50-E59 ED0-ED9 F20-F33 1040-1049 1090-1099
1369-137C 16EE-16F0 17E0-17E9 17F0-17F9 1810-1819 1946-194F 19D0-19DA 1A80-1A89 1A90-1A99 1B50-1B59
1BB0-1BB9 1C40-1C49 1C50-1C59 2070 2074-2079 2080-2089 2150-2182 2185-2189 2460-249B 24EA-24FF 2776-2793
2CFD 3007 3021-3029 3038-303A 3192-3195 3220-3229 3248-324F 3251-325F 3280-3289 32B1-32BF A620-A629
A6E6-A6EF A830-A835 A8D0-A8D9 A900-A909 A9D0-A9D9 A9F0-A9F9 AA50-AA59 ABF0-ABF9 FF10-FF19 10107-10133
10140-10178 1018A-1018B 102E1-102FB 10320-10323 10341 1034A 103D1-103D5 104A0-104A9 10858-1085F
10879-1087F 108A7-108AF 108FB-108FF 10916-1091B 109BC-109BD 109C0-109CF 109D2-109FF 10A40-10A48
10A7D-10A7E 10A9D-10A9F 10AEB-10AEF 10B58-10B5F 10B78-10B7F 10BA9-10BAF 10CFA-10CFF 10D30-10D39
10E60-10E7E 10F1D-10F26 10F51-10F54 10FC5-10FCB 11052-1106F 110F0-110F9 11136-1113F 111D0-111D9
111E1-111F4 112F0-112F9 11450-11459 114D0-114D9 11650-11659 116C0-116C9 11730-1173B 118E0-118F2
11950-11959 11C50-11C6C 11D50-11D59 11DA0-11DA9 11F50-11F59 11FC0-11FD4 12400-1246E 16A60-16A69
16AC0-16AC9 16B50-16B59 16B5B-16B61 16E80-16E96 1D2C0-1D2D3 1D2E0-1D2F3 1D360-1D378 1D7CE-1D7FF
1E140-1E149 1E2F0-1E2F9 1E4F0-1E4F9 1E8C7-1E8CF 1E950-1E959 1EC71-1ECAB 1ECAD-1ECAF 1ECB1-1ECB4
1ED01-1ED2D 1ED2F-1ED3D 1F100-1F10C 1FBF0-1FBF9
"""

PUNCTUATION = """
21-23 25-2A 2C-2F 3A-3B 3F-40 5B-5D 5F 7B 7D A1 A7 AB B6-B7 BB BF 37E 387 55A-55F 589-58A 5BE 5C0 5C3 5C6
5F3-5F4 609-60A 60C-60D 61B 61D-61F 66A-66D 6D4 700-70D 7F7-7F9 830-83E 85E 964-965 970 9FD A76 AF0 C77
C84 DF4 E4F E5A-E5B F04-F12 F14 F3A-F3D F85 FD0-FD4 FD9-FDA 104A-104F 10FB 1360-1368 1400 166E 169B-169C
16EB-16ED 1735-1736 17D4-17D6 17D8-17DA 1800-180A 1944-1945 1A1E-1A1F 1AA0-1AA6 1AA8-1AAD 1B5A-1B60
1B7D-1B7E 1BFC-1BFF 1C3B-1C3F 1C7E-1C7F 1CC0-1CC7 1CD3 2010-2027 2030-2043 2045-2051 2053-205E 207D-207E
208D-208E 2308-230B 2329-232A 2768-2775 27C5-27C6 27E6-27EF 2983-2998 29D8-29DB 29FC-29FD 2CF9-2CFC
2CFE-2CFF 2D70 2E00-2E2E 2E30-2E4F 2E52-2E5D 3001-3003 3008-3011 3014-301F 3030 303D 30A0 30FB A4FE-A4FF
A60D-A60F A673 A67E A6F2-A6F7 A874-A877 A8CE-A8CF A8F8-A8FA A8FC A92E-A92F A95F A9C1-A9CD A9DE-A9DF
AA5C-AA5F AADE-AADF AAF0-AAF1 ABEB FD3E-FD3F FE10-FE19 FE30-FE52 FE54-FE61 FE63 FE68 FE6A-FE6B FF01-FF03
FF05-FF0A FF0C-FF0F FF1A-FF1B FF1F-FF20 FF3B-FF3D FF3F FF5B FF5D FF5F-FF65 10100-10102 1039F 103D0 1056F
10857 1091F 1093F 10A50-10A58 10A7F 10AF0-10AF6 10B39-10B3F 10B99-10B9C 10EAD 10F55-10F59 10F86-10F89
11047-1104D 110BB-110BC 110BE-110C1 11140-11143 11174-11175 111C5-111C8 111CD 111DB 111DD-111DF
11238-1123D 112A9 1144B-1144F 1145A-1145B 1145D 114C6 115C1-115D7 11641-11643 11660-1166C 116B9
1173C-1173E 1183B 11944-11946 119E2 11A3F-11A46 11A9A-11A9C 11A9E-11AA2 11B00-11B09 11C41-11C45
11C70-11C71 11EF7-11EF8 11F43-11F4F 11FFF 12470-12474 12FF1-12FF2 16A6E-16A6F 16AF5 16B37-16B3B 16B44
16E97-16E9A 16FE2 1BC9F 1DA87-1DA8B 1E95E-1E95F
"""

MARKS = """
300-36F 483-489 591-5BD 5BF 5C1-5C2 5C4-5C5 5C7 610-61A 64B-65F 670 6D6-6DC 6DF-6E4 6E7-6E8 6EA-6ED 711
730-74A 7A6-7B0 7EB-7F3 7FD 816-819 81B-823 825-827 829-82D 859-85B 898-89F 8CA-8E1 8E3-903 93A-93C
93E-94F 951-957 962-963 981-983 9BC 9BE-9C4 9C7-9C8 9CB-9CD 9D7 9E2-9E3 9FE A01-A03 A3C A3E-A42 A47-A48
A4B-A4D A51 A70-A71 A75 A81-A83 ABC ABE-AC5 AC7-AC9 ACB-ACD AE2-AE3 AFA-AFF B01-B03 B3C B3E-B44 B47-B48
B4B-B4D B55-B57 B62-B63 B82 BBE-BC2 BC6-BC8 BCA-BCD BD7 C00-C04 C3C C3E-C44 C46-C48 C4A-C4D C55-C56
C62-C63 C81-C83 CBC CBE-CC4 CC6-CC8 CCA-CCD CD5-CD6 CE2-CE3 CF3 D00-D03 D3B-D3C D3E-D44 D46-D48 D4A-D4D
D57 D62-D63 D81-D83 DCA DCF-DD4 DD6 DD8-DDF DF2-DF3 E31 E34-E3A E47-E4E EB1 EB4-EBC EC8-ECE F18-F19 F35
F37 F39 F3E-F3F F71-F84 F86-F87 F8D-F97 F99-FBC FC6 102B-103E 1056-1059 105E-1060 1062-1064 1067-106D
1071-1074 1082-108D 108F 109A-109D 135D-135F 1712-1715 1732-1734 1752-1753 1772-1773 17B4-17D3 17DD
180B-180D 180F 1885-1886 18A9 1920-192B 1930-193B 1A17-1A1B 1A55-1A5E 1A60-1A7C 1A7F 1AB0-1ACE 1B00-1B04
1B34-1B44 1B6B-1B73 1B80-1B82 1BA1-1BAD 1BE6-1BF3 1C24-1C37 1CD0-1CD2 1CD4-1CE8 1CED 1CF4 1CF7-1CF9
1DC0-1DFF 20D0-20F0 2CEF-2CF1 2D7F 2DE0-2DFF 302A-302F 3099-309A A66F-A672 A674-A67D A69E-A69F A6F0-A6F1
A802 A806 A80B A823-A827 A82C A880-A881 A8B4-A8C5 A8E0-A8F1 A8FF A926-A92D A947-A953 A980-A983 A9B3-A9C0
A9E5 AA29-AA36 AA43 AA4C-AA4D AA7B-AA7D AAB0 AAB2-AAB4 AAB7-AAB8 AABE-AABF AAC1 AAEB-AAEF AAF5-AAF6
ABE3-ABEA ABEC-ABED FB1E FE00-FE0F FE20-FE2F 101FD 102E0 10376-1037A 10A01-10A03 10A05-10A06 10A0C-10A0F
10A38-10A3A 10A3F 10AE5-10AE6 10D24-10D27 10EAB-10EAC 10EFD-10EFF 10F46-10F50 10F82-10F85 11000-11002
11038-11046 11070 11073-11074 1107F-11082 110B0-110BA 110C2 11100-11102 11127-11134 11145-11146 11173
11180-11182 111B3-111C0 111C9-111CC 111CE-111CF 1122C-11237 1123E 11241 112DF-112EA 11300-11303
1133B-1133C 1133E-11344 11347-11348 1134B-1134D 11357 11362-11363 11366-1136C 11370-11374 11435-11446
1145E 114B0-114C3 115AF-115B5 115B8-115C0 115DC-115DD 11630-11640 116AB-116B7 1171D-1172B 1182C-1183A
11930-11935 11937-11938 1193B-1193E 11940 11942-11943 119D1-119D7 119DA-119E0 119E4 11A01-11A0A
11A33-11A39 11A3B-11A3E 11A47 11A51-11A5B 11A8A-11A99 11C2F-11C36 11C38-11C3F 11C92-11CA7 11CA9-11CB6
11D31-11D36 11D3A 11D3C-11D3D 11D3F-11D45 11D47 11D8A-11D8E 11D90-11D91 11D93-11D97 11EF3-11EF6
11F00-11F01 11F03 11F34-11F3A 11F3E-11F42 13440 13447-13455 16AF0-16AF4 16B30-16B36 16F4F 16F51-16F87
16F8F-16F92 16FE4 16FF0-16FF1 1BC9D-1BC9E 1CF00-1CF2D 1CF30-1CF46 1D165-1D169 1D16D-1D172 1D17B-1D182
1D185-1D18B 1D1AA-1D1AD 1D242-1D244 1DA00-1DA36 1DA3B-1DA6C 1DA75 1DA84 1DA9B-1DA9F 1DAA1-1DAAF
1E000-1E006 1E008-1E018 1E01B-1E021 1E023-1E024 1E026-1E02A 1E08F 1E130-1E136 1E2AE 1E2EC-1E2EF
1E4EC-1E4EF 1E8D0-1E8D6 1E944-1E94A E0100-E01EF
"""

SYMBOLS = """
24 2B 3C-3E 5E 60 7C 7E A2-A6 A8-A9 AC AE-B1 B4 B8 D7 F7 2C2-2C5 2D2-2DF 2E5-2EB 2ED 2EF-2FF 375 384-385
3F6 482 58D-58F 606-608 60B 60E-60F 6DE 6E9 6FD-6FE 7F6 7FE-7FF 888 9F2-9F3 9FA-9FB AF1 B70 BF3-BFA C7F
D4F D79 E3F F01-F03 F13 F15-F17 F1A-F1F F34 F36 F38 FBE-FC5 FC7-FCC FCE-FCF FD5-FD8 109E-109F 1390-1399
166D 17DB 1940 19DE-19FF 1B61-1B6A 1B74-1B7C 1FBD 1FBF-1FC1 1FCD-1FCF 1FDD-1FDF 1FED-1FEF 1FFD-1FFE 2044
2052 207A-207C 208A-208C 20A0-20C0 2100-2101 2103-2106 2108-2109 2114 2116-2118 211E-2123 2125 2127 2129
212E 213A-213B 2140-2144 214A-214D 214F 218A-218B 2190-2307 230C-2328 232B-2426 2440-244A 249C-24E9
2500-2767 2794-27C4 27C7-27E5 27F0-2982 2999-29D7 29DC-29FB 29FE-2B73 2B76-2B95 2B97-2BFF 2CE5-2CEA
2E50-2E51 2E80-2E99 2E9B-2EF3 2F00-2FD5 2FF0-2FFF 3004 3012-3013 3020 3036-3037 303E-303F 309B-309C
3190-3191 3196-319F 31C0-31E3 31EF 3200-321E 322A-3247 3250 3260-327F 328A-32B0 32C0-33FF 4DC0-4DFF
A490-A4C6 A700-A716 A720-A721 A789-A78A A828-A82B A836-A839 AA77-AA79 AB5B AB6A-AB6B FB29 FBB2-FBC2
FD40-FD4F FDCF FDFC-FDFF FE62 FE64-FE66 FE69 FF04 FF0B FF1C-FF1E FF3E FF40 FF5C FF5E FFE0-FFE6 FFE8-FFEE
FFFC-FFFD 10137-1013F 10179-10189 1018C-1018E 10190-1019C 101A0 101D0-101FC 10877-10878 10AC8 1173F
11FD5-11FF1 16B3C-16B3F 16B45 1BC9C 1CF50-1CFC3 1D000-1D0F5 1D100-1D126 1D129-1D164 1D16A-1D16C
1D183-1D184 1D18C-1D1A9 1D1AE-1D1EA 1D200-1D241 1D245 1D300-1D356 1D6C1 1D6DB 1D6FB 1D715 1D735 1D74F
1D76F 1D789 1D7A9 1D7C3 1D800-1D9FF 1DA37-1DA3A 1DA6D-1DA74 1DA76-1DA83 1DA85-1DA86 1E14F 1E2FF 1ECAC
1ECB0 1ED2E 1EEF0-1EEF1 1F000-1F02B 1F030-1F093 1F0A0-1F0AE 1F0B1-1F0BF 1F0C1-1F0CF 1F0D1-1F0F5
1F10D-1F1AD 1F1E6-1F202 1F210-1F23B 1F240-1F248 1F250-1F251 1F260-1F265 1F300-1F6D7 1F6DC-1F6EC
1F6F0-1F6FC 1F700-1F776 1F77B-1F7D9 1F7E0-1F7EB 1F7F0 1F800-1F80B 1F810-1F847 1F850-1F859 1F860-1F887
1F890-1F8AD 1F8B0-1F8B1 1F900-1FA53 1FA60-1FA6D 1FA70-1FA7C 1FA80-1FA88 1FA90-1FABD 1FABF-1FAC5
1FACE-1FADB 1FAE0-1FAE8 1FAF0-1FAF8 1FB00-1FB92 1FB94-1FBCA
"""

CONTROL_CHARACTERS = """
0-1F 7F-9F AD 600-605 61C 6DD 70F 890-891 8E2 180E 200B-200F 202A-202E 2060-2064 2066-206F D800-F8FF FEFF
FFF9-FFFB 110BD 110CD 13430-1343F 1BCA0-1BCA3 1D173-1D17A E0001 E0020-E007F F0000-FFFFD 100000-10FFFD
"""

WHITE_SPACE = "9-D 20 85 A0 1680 2000-200A 2028-2029 202F 205F 3000"

# Letters with case, as listed in the pre-tokenizer of DeepSeek LLM.
CASED_LETTERS = """
41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 388-38A 38C
38E-3A1 3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B
1D6B-1D77 1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4
1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113
2115 2119-211D 2124 2126 2128 212A-212D 212F-2134 2139 213C-213F 2145-2149 214E 2183 2184 2C00-2C7B
2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 A640-A66D A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06
FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F 104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF
1E900-1E943
"""


if TYPE_CHECKING:
    from numpy.typing import NDArray

    CodePoints = NDArray[np.int64]

N_CODE_POINTS = 0x110000

NAMED = {
    "L": LETTERS,
    "N": NUMBERS,
    "P": PUNCTUATION,
    "M": MARKS,
    "S": SYMBOLS,
    "C": CONTROL_CHARACTERS,
    "Cased": CASED_LETTERS,
    "Han": "3400-4DBF 4E00-9FFF F900-FAFF 20000-2A6DF 2A700-2B73F 2B740-2CEAF 2CEB0-2EBEF 2F800-2FA1F",
    "s": WHITE_SPACE,
    "ASCII symbols": "24 2B 3C-3E 5E 60 7C 7E",
    # Hugging Face's BERT normalizer contains 2B920 instead of 2B820, and the vocabularies were made with this range.
    "Ideographs of BERT": "3400-4DBF 4E00-9FFF F900-FAFF 20000-2A6DF 2A700-2B73F 2B740-2B81F 2B920-2CEAF 2F800-2FA1F",
}


@functools.cache
def named(name: str) -> CodePoints:
    """Return the set that NAMED contains under the given name."""
    spans = [code_points.partition("-") for code_points in NAMED[name].split()]
    return union(*(span(int(first, 16), int(last or first, 16)) for first, _, last in spans))


def span(first: int, last: int) -> CodePoints:
    """Return the set of the code points from `first` to `last`, including both."""
    return np.array([first, last + 1], np.int64)


def union(*sets: CodePoints) -> CodePoints:
    """Return the code points that are in at least one of the sets."""
    if len(sets) == 1:
        return sets[0]
    # Sweep over all edges once. `depth` is the number of sets that contain the code points between two edges.
    edges = np.concatenate(sets)
    steps = np.concatenate([_steps(one) for one in sets])
    places = _distinct(edges)
    depth = np.cumsum(np.bincount(np.searchsorted(places, edges), weights=steps, minlength=len(places)))
    return _changes(places, depth > 0)


def complement(one: CodePoints) -> CodePoints:
    """Return the code points that are not in the set."""
    places = _distinct(np.concatenate([one, [0, N_CODE_POINTS]]))
    return _changes(places, ~contains(one, places) & (places < N_CODE_POINTS))


def intersection(one: CodePoints, other: CodePoints) -> CodePoints:
    """Return the code points that are in both sets."""
    places = _distinct(np.concatenate([one, other]))
    return _changes(places, contains(one, places) & contains(other, places))


def contains(one: CodePoints, places: CodePoints) -> NDArray[np.bool_]:
    """Return bool[places]: True for each code point that the set contains."""
    inside: NDArray[np.bool_] = np.searchsorted(one, places, side="right") % 2 == 1
    return inside


def symbols_of(sets: list[CodePoints]) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """Assign a symbol to every code point. Code points that belong to exactly the same sets share a symbol.

    Returns uint8[N_CODE_POINTS], the symbol of each code point, and bool[sets, symbols], the symbols in each set. At
    most 62 sets are supported.
    """
    places = _distinct(np.concatenate([np.zeros(1, np.int64), *sets]))
    places = places[places < N_CODE_POINTS]
    membership = np.stack([contains(one, places) for one in sets])
    signature = (membership.astype(np.int64) << np.arange(len(sets))[:, None]).sum(axis=0)
    number = np.searchsorted(_distinct(signature), signature)
    table = np.repeat(number.astype(np.uint8), np.diff(places, append=N_CODE_POINTS))
    of_symbols = np.empty((len(sets), number.max() + 1), np.bool_)
    of_symbols[:, number] = membership
    return table, of_symbols


def _distinct(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the distinct numbers, none of which is negative, in ascending order.

    The first call of np.unique imports numpy.ma, which would delay the first token by 10 to 18 ms.
    """
    ordered = np.sort(numbers)
    distinct: NDArray[np.int64] = ordered[np.diff(ordered, prepend=-1) != 0]
    return distinct


def _steps(one: CodePoints) -> CodePoints:
    steps = np.ones(len(one), np.int64)
    steps[1::2] = -1
    return steps


def _changes(places: CodePoints, inside: NDArray[Any]) -> CodePoints:
    """Build a set from sorted places.

    `inside[i]` is True if the set contains the code points from place i up to, but not including, place i + 1.
    """
    before = np.concatenate([np.zeros(1, np.bool_), inside[:-1]])
    changed: CodePoints = places[inside != before]
    return changed


_ESCAPED = {"r": "\r", "n": "\n", "t": "\t"}
_NO_MORE_WORD = r"(?!\S)"


class OneOf(Struct, frozen=True, eq=False):
    """A node that matches one character of a set."""

    members: CodePoints


class Ahead(Struct, frozen=True, eq=False):
    """A lookahead that matches before a character of a set and at the end of the text."""

    members: CodePoints


class Sequence(Struct, frozen=True, eq=False):
    """A node that matches its parts one after the other."""

    parts: tuple[Node, ...]


class Choice(Struct, frozen=True, eq=False):
    """A node that matches the first of its parts with which the whole pattern matches."""

    parts: tuple[Node, ...]


class Repeat(Struct, frozen=True, eq=False):
    """A node that matches its part `least` to `most` times, as often as possible. `most` is None for no limit."""

    part: Node
    least: int
    most: int | None


Node = OneOf | Ahead | Sequence | Choice | Repeat


def parse(pattern: str) -> Node:
    """Parse a pattern. Raises ValueError for a pattern outside the subset described at the top of this module."""
    parser = _Parser(pattern)
    node = parser.choice()
    if parser.at < len(pattern):
        raise ValueError(f"pattern {pattern!r}: unexpected {pattern[parser.at]!r} at {parser.at}")
    return node


class _Parser:
    """A recursive-descent parser for patterns. `at` is the current position in the pattern."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self.at = 0

    def choice(self) -> Node:
        parts = [self._sequence()]
        while self._takes("|"):
            parts.append(self._sequence())
        return parts[0] if len(parts) == 1 else Choice(tuple(parts))

    def _sequence(self) -> Node:
        parts: list[Node] = []
        while self.at < len(self._pattern) and self._pattern[self.at] not in "|)":
            parts.append(self._repeated(self._atom()))
        return Sequence(tuple(parts))

    def _repeated(self, node: Node) -> Node:
        if self._takes("?"):
            return Repeat(node, 0, 1)
        if self._takes("*"):
            return Repeat(node, 0, None)
        if self._takes("+"):
            return Repeat(node, 1, None)
        if self._takes("{"):
            least, comma, most = self._until("}").partition(",")
            return Repeat(node, int(least), int(most if comma else least))
        return node

    def _atom(self) -> Node:
        if self._takes(_NO_MORE_WORD):
            return Ahead(named("s"))
        if self._takes("(?:"):
            node = self.choice()
            self._expect(")")
            return node
        if self._takes("["):
            return OneOf(self._bracket())
        return OneOf(self._character()[0])

    def _bracket(self) -> CodePoints:
        """Parse a bracket expression up to and including the closing bracket."""
        inverted = self._takes("^")
        sets: list[CodePoints] = []
        while not self._takes("]"):
            if self._takes("&&["):
                sets = [intersection(union(*sets), self._bracket())]
                continue
            members, first = self._character()
            if first is not None and not self._pattern.startswith("-]", self.at) and self._takes("-"):
                last = self._character()[1]
                if last is None or last < first:
                    raise ValueError(f"pattern {self._pattern!r}: invalid range before {self.at}")
                members = span(first, last)
            sets.append(members)
        members = union(*sets)
        return complement(members) if inverted else members

    def _character(self) -> tuple[CodePoints, int | None]:
        """Parse one character or escape. Returns a set, and the code point if the set is a single character."""
        if self._takes("\\"):
            if self._takes("p{"):
                return named(self._until("}")), None
            if self._takes("s"):
                return named("s"), None
            if self._takes("S"):
                return complement(named("s")), None
            escaped = self._next()
            if escaped.isalnum() and escaped not in _ESCAPED:
                raise ValueError(f"pattern {self._pattern!r}: unknown escape \\{escaped}")
            character = _ESCAPED.get(escaped, escaped)
        else:
            character = self._next()
        return span(ord(character), ord(character)), ord(character)

    def _next(self) -> str:
        if self.at >= len(self._pattern):
            raise ValueError(f"pattern {self._pattern!r}: unexpected end")
        self.at += 1
        return self._pattern[self.at - 1]

    def _takes(self, text: str) -> bool:
        if not self._pattern.startswith(text, self.at):
            return False
        self.at += len(text)
        return True

    def _expect(self, text: str) -> None:
        if not self._takes(text):
            raise ValueError(f"pattern {self._pattern!r}: {text!r} is missing at {self.at}")

    def _until(self, text: str) -> str:
        end = self._pattern.find(text, self.at)
        if end < 0:
            raise ValueError(f"pattern {self._pattern!r}: {text!r} is missing")
        found = self._pattern[self.at : end]
        self.at = end + len(text)
        return found


class _Take(Struct, frozen=True):
    """A step that consumes one character, which must be in the set with the given index."""

    set_number: int
    after: int


class _Look(Struct, frozen=True):
    """A step that requires the next character, if there is one, to be in the set, without consuming the character."""

    set_number: int
    after: int


class _Fork(Struct, frozen=True):
    """A step that branches to several other steps, in order of preference."""

    after: tuple[int, ...]


_Step = _Take | _Look | _Fork | None  # None is the end of the pattern


def sets_of(node: Node) -> list[CodePoints]:
    """Return the sets of code points in a pattern, in the order of the rows of `membership` in `transitions`."""
    if isinstance(node, OneOf | Ahead):
        return [node.members]
    parts = (node.part,) if isinstance(node, Repeat) else node.parts
    return [members for part in parts for members in sets_of(part)]


def transitions(node: Node, membership: NDArray[np.bool_], n_symbols: int) -> NDArray[np.int32]:
    """Build a pattern's transition table, int32[states, n_symbols + 2].

    Each state has a row, and each symbol of the next character has a column. The last two columns are for continuation
    bytes of UTF-8 characters and for the end of the text. Row 0 is the start state. An entry combines the byte offset
    of the next row, shifted left by ROW_SHIFT, with the flag ENDS_HERE if a match ends before this character, and the
    flag NO_WAY_ON if there is no next row. `membership` is bool[sets of the pattern, n_symbols].
    """
    return _Walker(_steps_of(node), membership, n_symbols).table()


def _steps_of(node: Node) -> list[_Step]:
    """Return the pattern's steps. The first step is the end of the pattern, and the last step is the start."""
    steps: list[_Step] = [None]
    numbers: dict[int, int] = {}
    _number_sets(node, numbers, 0)
    steps.append(_Fork((_compile(node, 0, steps, numbers),)))
    return steps


def _number_sets(node: Node, numbers: dict[int, int], count: int) -> int:
    """Assign indices to the sets of a node in the order of `sets_of`, from `count` up. Returns the next free index."""
    if isinstance(node, OneOf | Ahead):
        numbers[id(node)] = count
        return count + 1
    for part in (node.part,) if isinstance(node, Repeat) else node.parts:
        count = _number_sets(part, numbers, count)
    return count


def _compile(node: Node, after: int, steps: list[_Step], numbers: dict[int, int]) -> int:
    """Append the steps of a node, which continue at the step with index `after`. Returns the first step's index."""

    def add(step: _Step) -> int:
        steps.append(step)
        return len(steps) - 1

    if isinstance(node, OneOf):
        return add(_Take(numbers[id(node)], after))
    if isinstance(node, Ahead):
        return add(_Look(numbers[id(node)], after))
    if isinstance(node, Sequence):
        for part in reversed(node.parts):
            after = _compile(part, after, steps, numbers)
        return after
    if isinstance(node, Choice):
        return add(_Fork(tuple([_compile(part, after, steps, numbers) for part in node.parts])))
    if node.most is None:
        loop = add(None)
        steps[loop] = _Fork((_compile(node.part, loop, steps, numbers), after))
        first = loop
    else:
        first = after
        for _ in range(node.most - node.least):
            first = add(_Fork((_compile(node.part, first, steps, numbers), after)))
    for _ in range(node.least):
        first = _compile(node.part, first, steps, numbers)
    return first


class _Walker:
    """Builds the table. A state is the tuple of steps that may come next, in order of preference."""

    def __init__(self, steps: Ordered[_Step], membership: NDArray[np.bool_], n_symbols: int) -> None:
        self._steps = steps
        self._members = [set(np.flatnonzero(row).tolist()) for row in membership]
        self._n_symbols = n_symbols
        self._end = n_symbols + 1

    def table(self) -> NDArray[np.int32]:
        """Return the transition table."""
        start: tuple[int, ...] = (len(self._steps) - 1,)
        numbers = {start: 0}
        waiting = [start]
        row_bytes = 4 * (self._n_symbols + 2)
        rows: list[list[int]] = []
        for state in waiting:  # the loop appends new states
            row = []
            for follow, matched in self._followers(state):
                entry = ENDS_HERE if matched else 0
                if not follow:
                    row.append(entry | NO_WAY_ON)
                    continue
                if follow not in numbers:
                    numbers[follow] = len(waiting)
                    waiting.append(follow)
                row.append(entry | numbers[follow] * row_bytes << ROW_SHIFT)
            row.insert(self._n_symbols, len(rows) * row_bytes << ROW_SHIFT)
            rows.append(row)
        return np.array(rows, np.int32)

    def _followers(self, state: tuple[int, ...]) -> list[tuple[tuple[int, ...], bool]]:
        """Return (next state, whether a match ends before it) for every symbol, then for the end of the text."""
        result: list[tuple[tuple[int, ...], bool]] = []
        known: tuple[list[_Take], bool] | None = None
        for symbol in (*range(self._n_symbols), self._end):
            takes, matched = known or self._reached(state, symbol)
            if known is None and not self._looked:
                known = takes, matched
            after = [take.after for take in takes if symbol in self._members[take.set_number]]
            result.append((tuple(dict.fromkeys(after)), matched))
        return result

    def _reached(self, state: tuple[int, ...], symbol: int) -> tuple[list[_Take], bool]:
        """Follow all branches from a state, given the symbol of the next character.

        Returns the _Take steps reached, in order of preference, and whether the pattern's end is reached. Steps with a
        lower preference than a reached end are left out.
        """
        self._looked = False
        takes: list[_Take] = []
        seen: set[int] = set()
        waiting = list(reversed(state))
        while waiting:
            number = waiting.pop()
            if number in seen:
                continue
            seen.add(number)
            step = self._steps[number]
            if step is None:
                return takes, True
            if isinstance(step, _Take):
                takes.append(step)
            elif isinstance(step, _Fork):
                waiting += reversed(step.after)
            else:
                self._looked = True
                if symbol == self._end or symbol in self._members[step.set_number]:
                    waiting.append(step.after)
        return takes, False
